//! What `clinch top` shows and what its keys do, apart from the terminal, the store and the clock.

pub(crate) mod handoffs;
pub(crate) mod key;
pub(crate) mod model;
pub(crate) mod view;
