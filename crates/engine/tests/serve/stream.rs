//! Requests that are followed through a channel of their own.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread;

use super::toy::Toy;
use super::*;

fn told(receiver: &Receiver<Event>) -> Vec<Event> {
    receiver.try_iter().collect()
}

fn id_of(event: &Event) -> RequestId {
    match *event {
        Event::Token { id, .. } | Event::Preempted { id } | Event::Finished { id, .. } => id,
    }
}

#[test]
fn a_channel_has_the_events_of_its_request_and_ends() {
    // So few pages that requests are preempted: their channels are told.
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, &config(4, 17)).unwrap();
    let streams: Vec<_> = specs(6).into_iter().map(|spec| session.stream(spec).unwrap()).collect();
    let mut all: HashMap<RequestId, Vec<Event>> = HashMap::new();
    session.run_to_end(&mut model, &mut |event| all.entry(id_of(&event)).or_default().push(event)).unwrap();
    assert!(session.stats().num_preemptions > 0);
    for (id, receiver) in streams {
        assert_eq!(told(&receiver), all[&id], "{id}");
        assert_eq!(receiver.try_recv(), Err(TryRecvError::Disconnected), "the channel ends with the request");
    }
}

#[test]
fn a_thread_reads_tokens_while_others_are_computed() {
    let (expected, _) = run(&cached(4, 60), &specs(3));
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, &cached(4, 60)).unwrap();
    let readers: Vec<_> = specs(3)
        .into_iter()
        .map(|spec| {
            let (_, receiver) = session.stream(spec).unwrap();
            let token = |event| if let Event::Token { token, .. } = event { Some(token) } else { None };
            thread::spawn(move || receiver.iter().filter_map(token).collect::<Vec<u32>>())
        })
        .collect();
    session.run_to_end(&mut model, &mut |_| {}).unwrap();
    let got: Vec<Vec<u32>> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    assert_eq!(got, tokens(&expected));
}

#[test]
fn who_hangs_up_cancels_the_own_request_and_no_other() {
    let specs = specs(3);
    let (expected, _) = run(&cached(4, 60), &specs);
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, &cached(4, 60)).unwrap();
    let mut streams: Vec<_> = specs.into_iter().map(|spec| session.stream(spec).unwrap()).collect();
    let heard = |streams: &[(RequestId, Receiver<Event>)]| told(&streams[1].1).len();
    for _ in 0..4 {
        assert!(session.step(&mut model, &mut |_| {}).unwrap());
    }
    assert_eq!(heard(&streams), 4);
    let (id, receiver) = streams.remove(1);
    drop(receiver);
    let mut events = Vec::new();
    assert!(session.step(&mut model, &mut |event| events.push(event)).unwrap());
    audit(&mut session);
    assert!(events.contains(&Event::Finished { id, reason: FinishReason::Cancelled }), "{events:?}");
    assert!(!session.cancel(id), "it has ended");
    session.run_to_end(&mut model, &mut |_| {}).unwrap();
    let got = drain(&mut session);
    assert_eq!((got[1].reason, got[1].tokens.len()), (FinishReason::Cancelled, 5));
    assert_eq!(got[1].tokens, expected[1].tokens[..5]);
    assert_eq!((&got[0], &got[2]), (&expected[0], &expected[2]));
    assert_eq!(session.stats().num_cancelled, 1);
}

#[test]
fn a_cancelled_request_tells_its_channel() {
    let model = Toy::new(None);
    let mut session = Session::new(&model, &config(4, 60)).unwrap();
    let (id, receiver) = session.stream(specs(1).remove(0)).unwrap();
    assert!(session.cancel(id));
    assert_eq!(told(&receiver), [Event::Finished { id, reason: FinishReason::Cancelled }]);
    assert_eq!(receiver.try_recv(), Err(TryRecvError::Disconnected));
    // A refused request has no channel, and changes nothing.
    let mut spec = specs(1).remove(0);
    spec.prompt.clear();
    assert!(matches!(session.stream(spec), Err(SubmitError::EmptyPrompt)));
    assert!(session.is_idle());
}
