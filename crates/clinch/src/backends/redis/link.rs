//! One live connection.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};

use super::failure::Failure;
use super::settings::Address;
use crate::backends::life::{Gone, Life, Traffic, drive};
use crate::backends::pool::Connection;
use crate::env::Env;

/// A connection to one server, shared by everybody on one runtime.
pub(super) struct Link {
    connection: MultiplexedConnection,
    traffic: Arc<Traffic>,
    life: Arc<Life>,
    server: String,
}

impl Link {
    /// Has the current runtime drive a connection.
    pub(super) fn new(
        connection: MultiplexedConnection,
        driver: impl Future<Output = ()> + Send + 'static,
        address: &Address,
        env: Env,
    ) -> Link {
        let (traffic, life) = (Arc::new(Traffic::default()), Arc::new(Life::default()));
        tokio::spawn(drive(driver, env, traffic.clone(), Gone(life.clone())));
        Link { connection, traffic, life, server: address.to_string() }
    }

    /// The server's address, for people.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Sends one command.
    ///
    /// # Cancel safety
    ///
    /// The command may be applied or not; the connection stays in step.
    pub(super) async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        let waiting = self.traffic.waiting();
        let answer = self.connection.clone().send_packed_command(command).await;
        waiting.answered();
        Failure::check(answer)
    }

    /// Sends commands that nothing may come between, and gives the last `count` answers.
    pub(super) async fn call_together(
        &self,
        commands: &Pipeline,
        count: usize,
    ) -> Result<Vec<Value>, Failure> {
        let waiting = self.traffic.waiting();
        let skipped = commands.len().saturating_sub(count);
        let answers = self.connection.clone().send_packed_commands(commands, skipped, count).await;
        waiting.answered();
        match answers {
            Ok(answers) => Ok(answers),
            Err(error) => Err(Failure::check(Err(error))
                .err()
                .unwrap_or_else(|| Failure::Server { code: "ERR".into(), detail: "no answer".into() })),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.life.close();
    }
}

impl Connection for Link {
    fn is_open(&self) -> bool {
        self.life.is_open()
    }
}
