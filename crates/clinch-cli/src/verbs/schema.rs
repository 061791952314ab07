//! `clinch schema`: what is written as JSON, described for programs.

use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};

use crate::args::{Format, Schema};
use crate::documents::{
    Document, ErrorJson, LeaseJson, LocksJson, MessageJson, ResultJson, ResultsJson, ShownJson, json,
};
use crate::exit::Outcome;
use crate::job::events::Line;
use crate::output::show;
use crate::verbs::doctor::ReportJson;

pub(crate) fn run(args: &Schema) -> Outcome {
    let schema = match args.format {
        Format::Events => of::<Line<'_>>(),
        Format::Ls => of::<Document<LocksJson>>(),
        Format::Show => of::<Document<ShownJson>>(),
        Format::Acquire => of::<Document<LeaseJson>>(),
        Format::Renew | Format::Release => of::<Document<ResultJson>>(),
        Format::Break => of::<Document<ResultsJson>>(),
        Format::Doctor => of::<Document<ReportJson<'_>>>(),
        Format::Error => of::<Document<ErrorJson>>(),
        Format::Message => of::<Document<MessageJson>>(),
    };
    show(&json(&schema)?)?;
    Ok(0)
}

/// Of what is written: what may be null is there all the same.
fn of<T: JsonSchema>() -> schemars::Schema {
    SchemaGenerator::new(SchemaSettings::draft2020_12().for_serialize()).into_root_schema_for::<T>()
}
