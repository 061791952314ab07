//! The conformance suite on `memory://`.

#![cfg(feature = "conformance")]

use std::sync::Arc;

use async_trait::async_trait;
use clinch::backend::Backend;
use clinch::backends::memory::Memory;
use clinch::conformance::Fixture;
use clinch::{Env, Lane};

/// A store of its own for every property; its clients share it.
struct InMemory(Memory);

#[async_trait]
impl Fixture for InMemory {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        Arc::new(self.0.client(env.clone()))
    }
}

clinch::conformance!(InMemory(Memory::new(Env::host(Lane::thread()))));
