//! What can happen on the way to a server.

use std::time::Duration;

use clinch_testkit::{Direction, Proxy};

use super::last;
use crate::cells::Fault;
use crate::dice::Dice;

/// The faults of a network.
pub(crate) const FAULTS: &[Fault] =
    &[Fault::Cut, Fault::Refuse, Fault::Silence, Fault::Deaf, Fault::Late, Fault::Strand, Fault::Slow];

/// Bytes after which a connection is cut at most: some requests and answers.
const BYTES: u64 = 1500;

/// Does one of them on some of the ways, for a while.
pub(crate) fn strike(fault: Fault, ways: &[&Proxy], dice: &mut Dice) {
    match fault {
        Fault::Cut => cut(ways, dice),
        Fault::Refuse => {
            ways.iter().for_each(|way| {
                way.refuse(true);
                way.cut_all();
            });
            last(dice);
            ways.iter().for_each(|way| way.refuse(false));
        }
        Fault::Silence => {
            ways.iter().for_each(|way| way.black_hole(true));
            last(dice);
            ways.iter().for_each(|way| way.black_hole(false));
        }
        Fault::Deaf => {
            ways.iter().for_each(|way| way.hold_replies(true));
            last(dice);
            ways.iter().for_each(|way| way.hold_replies(false));
        }
        Fault::Late => {
            ways.iter().for_each(|way| {
                way.hold_ends(true);
                way.black_hole(true);
            });
            last(dice);
            ways.iter().for_each(|way| way.black_hole(false));
            std::thread::sleep(Duration::from_millis(50));
            ways.iter().for_each(|way| way.hold_ends(false));
        }
        Fault::Strand => {
            ways.iter().for_each(|way| way.strand(true));
            // Callers first have to give up.
            std::thread::sleep(dice.ms(2000, 6000));
            ways.iter().for_each(|way| way.strand(false));
        }
        Fault::Slow => {
            let delay = dice.ms(5, 250);
            ways.iter().for_each(|way| way.delay(delay));
            std::thread::sleep(dice.ms(500, 2500));
            ways.iter().for_each(|way| way.delay(Duration::ZERO));
        }
        other => panic!("{other} is no fault of a network"),
    }
}

/// Cuts connections one after the other, each somewhere in a request or an answer.
fn cut(ways: &[&Proxy], dice: &mut Dice) {
    for _ in 0..8 + dice.below(12) {
        for way in ways {
            let direction = *dice.pick(&[Direction::Requests, Direction::Replies]);
            way.cut_after(direction, dice.below(BYTES));
        }
        std::thread::sleep(dice.ms(10, 80));
    }
    ways.iter().for_each(|way| way.cut_all());
}

/// Some of these, at least one and at most so many.
pub(crate) fn some_of<'a, T>(all: &'a [T], most: usize, dice: &mut Dice) -> Vec<&'a T> {
    let mut some: Vec<&T> = all.iter().collect();
    dice.shuffle(&mut some);
    let count = 1 + dice.below(most.max(1) as u64);
    some.truncate(usize::try_from(count).unwrap_or(1));
    some
}
