//! The clinch command.
fn main() {}
