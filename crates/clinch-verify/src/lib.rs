//! Histories of distributed locks and the checker that judges them.
