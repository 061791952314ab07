//! Clinch.
