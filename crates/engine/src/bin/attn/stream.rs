//! Text of several requests on one terminal: each request's text whole, in the order of the prompts, the first
//! unfinished one as it comes.

use std::io::{Write as _, stdout};

use engine::model::{StreamDecoder, Tokenizer};
use engine::serve::Event;

/// The texts of a session's requests.
pub struct TextStreams<'a> {
    streams: Vec<Stream<'a>>,
    /// The request whose text is on the screen now.
    shown: usize,
}

struct Stream<'a> {
    /// `None` once the request has ended.
    decoder: Option<StreamDecoder<'a>>,
    /// Text that waits for its turn.
    pending: String,
}

impl<'a> TextStreams<'a> {
    /// Streams for this many requests, numbered from 0 in the order of submission.
    pub fn new(tokenizer: &'a Tokenizer, num_requests: usize) -> Self {
        let stream = || Stream { decoder: Some(tokenizer.stream(true)), pending: String::new() };
        let streams: Vec<_> = std::iter::repeat_with(stream).take(num_requests).collect();
        let this = Self { streams, shown: 0 };
        this.head();
        this
    }

    /// Takes what happened in a step.
    pub fn take(&mut self, event: Event) {
        let place = |id: engine::serve::RequestId| usize::try_from(id.index()).unwrap_or(usize::MAX);
        match event {
            Event::Token { id, token, .. } => {
                let Some(stream) = self.streams.get_mut(place(id)) else { return };
                if let Some(decoder) = &mut stream.decoder {
                    stream.pending.push_str(&decoder.push(token));
                }
            }
            Event::Finished { id, .. } => {
                let Some(stream) = self.streams.get_mut(place(id)) else { return };
                if let Some(decoder) = stream.decoder.take() {
                    stream.pending.push_str(&decoder.finish());
                }
            }
            Event::Preempted { .. } => {}
        }
        self.show();
    }

    fn show(&mut self) {
        while let Some(stream) = self.streams.get_mut(self.shown) {
            print(&std::mem::take(&mut stream.pending));
            if stream.decoder.is_some() {
                return;
            }
            print("\n");
            self.shown += 1;
            self.head();
        }
    }

    /// A line that says whose text follows, where there are several.
    fn head(&self) {
        if self.streams.len() > 1 && self.shown < self.streams.len() {
            print(&format!("--- request {}\n", self.shown));
        }
    }
}

/// Prints at once; a reader that has gone away is no error.
fn print(text: &str) {
    let mut out = stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
