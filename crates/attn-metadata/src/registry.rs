//! Backends by name, and how one is chosen: by name, by a pair `"prefill,decode"`, or `"auto"`.
//!
//! There is no silent fallback: a selection says what was chosen and why each other backend was not.

use std::fmt;

use thiserror::Error;

use crate::backend::{AttentionBackend, BackendConfig};
use crate::capability::{Capabilities, Reason};
use crate::error::CreateError;
use crate::hybrid::HybridBackend;
use crate::model::ModelSpec;
use crate::space::Space;

/// A backend of a space, whichever it is.
pub type BoxedBackend<S> = Box<dyn AttentionBackend<S>>;

/// One backend that can be chosen.
#[derive(Clone, Copy, Debug)]
pub struct BackendEntry<S: Space> {
    /// Its name, lower case, without a comma.
    pub name: &'static str,
    /// One line for tables.
    pub summary: &'static str,
    /// Whether `auto` may choose it. The oracle, say, is chosen by name alone.
    pub auto: bool,
    /// What it can do on this device.
    ///
    /// The error says what this machine lacks and what to do.
    pub capabilities: fn(&S::Device) -> Result<Capabilities, Reason>,
    /// Makes one.
    pub create: fn(&BackendConfig<S>) -> Result<BoxedBackend<S>, CreateError>,
}

/// A name by which another system knows something like one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// Their name.
    pub name: &'static str,
    /// Our nearest backend, or `None` where there is nothing near.
    pub target: Option<&'static str>,
    /// What it is there, and so why this target or none.
    pub note: &'static str,
}

/// The backends of a space, in order of preference, and names of other systems for them.
#[derive(Clone, Debug)]
pub struct Registry<S: Space> {
    entries: Vec<BackendEntry<S>>,
    aliases: Vec<Alias>,
}

/// A backend that was not chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Its name.
    pub name: &'static str,
    /// Why not.
    pub reasons: Vec<String>,
}

/// What was chosen, and what was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Backend for requests that extend.
    pub extend: &'static str,
    /// Backend for requests that decode.
    pub decode: &'static str,
    /// What to know about the names that were given, where they are another system's.
    pub notes: Vec<String>,
    /// Every other backend with its reasons.
    pub rejected: Vec<Rejection>,
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.extend == self.decode {
            f.write_str(self.extend)?;
        } else {
            write!(f, "{} for prefill, {} for decode", self.extend, self.decode)?;
        }
        for note in &self.notes {
            write!(f, "\n  note: {note}")?;
        }
        for Rejection { name, reasons } in &self.rejected {
            write!(f, "\n  not {name}: {}", reasons.join("; "))?;
        }
        Ok(())
    }
}

/// A choice that cannot be met.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SelectError {
    /// No backend has this name.
    #[error("there is no attention backend {name:?}; there are: auto, {}", known.join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// Another system's name for something that is not here.
    #[error("there is nothing like attention backend {name} here: {why}; there are: auto, {}", known.join(", "))]
    NoCounterpart {
        /// The name asked for.
        name: &'static str,
        /// What it is, and so why not.
        why: &'static str,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// The text is neither a name nor a pair of names.
    #[error("{text:?} is not a backend name, a pair \"prefill,decode\" or \"auto\"")]
    Malformed {
        /// The text.
        text: String,
    },
    /// The named backend cannot run the model.
    #[error("attention backend {name} cannot run this model: {}", reasons.join("; "))]
    Unsupported {
        /// The backend.
        name: &'static str,
        /// Why not.
        reasons: Vec<String>,
    },
    /// `auto` found nothing.
    #[error("no attention backend can run this model{}", rejected.iter().map(|r| format!("; not {}: {}", r.name, r.reasons.join(", "))).collect::<String>())]
    NoneFits {
        /// Every backend with its reasons.
        rejected: Vec<Rejection>,
    },
    /// The chosen backend could not be made.
    #[error(transparent)]
    Create(#[from] CreateError),
}

impl<S: Space> Registry<S> {
    /// A registry; earlier entries are preferred by `auto`.
    #[must_use]
    pub const fn new(entries: Vec<BackendEntry<S>>) -> Self {
        Self { entries, aliases: Vec::new() }
    }

    /// The same with names of other systems. A backend's own name comes before an alias.
    #[must_use]
    pub fn with_aliases(mut self, aliases: &[Alias]) -> Self {
        self.aliases.extend_from_slice(aliases);
        self
    }

    /// Names of other systems, in the order given.
    #[must_use]
    pub fn aliases(&self) -> &[Alias] {
        &self.aliases
    }

    /// The entries, in order of preference.
    #[must_use]
    pub fn entries(&self) -> &[BackendEntry<S>] {
        &self.entries
    }

    /// Adds a backend, preferred to those already there.
    pub fn prefer(&mut self, entry: BackendEntry<S>) {
        self.entries.insert(0, entry);
    }

    /// Chooses for a model: `choice` is a name, a pair `"prefill,decode"`, or `"auto"`.
    ///
    /// # Errors
    /// [`SelectError`], with every reason.
    pub fn select(&self, choice: &str, model: &ModelSpec, device: &S::Device) -> Result<Selection, SelectError> {
        let names: Vec<_> = choice.split(',').map(str::trim).collect();
        let (extend, decode) = match names[..] {
            ["auto"] => return self.select_auto(model, device),
            [one] if !one.is_empty() => (one, one),
            [extend, decode] if !extend.is_empty() && !decode.is_empty() => (extend, decode),
            _ => return Err(SelectError::Malformed { text: choice.to_owned() }),
        };
        let mut notes = Vec::new();
        let mut choose = |name: &str| {
            let name = self.own_name(name, &mut notes)?;
            if name == "auto" {
                self.select_auto(model, device).map(|s| s.extend)
            } else {
                self.named(name, model, device)
            }
        };
        let chosen = choose(extend)?;
        let (extend, decode) = (chosen, if decode == extend { chosen } else { choose(decode)? });
        let rejected = self.others(&[extend, decode], model, device);
        Ok(Selection { extend, decode, notes, rejected })
    }

    /// Chooses and makes a backend.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn create(&self, choice: &str, config: &BackendConfig<S>) -> Result<(BoxedBackend<S>, Selection), SelectError> {
        let selection = self.select(choice, &config.model, &config.device)?;
        let make = |name| (self.entry(name).expect("a selection names entries").create)(config);
        let extend = make(selection.extend)?;
        if selection.extend == selection.decode {
            return Ok((extend, selection));
        }
        let hybrid = HybridBackend::new(extend, make(selection.decode)?, config.limits, 1)?;
        Ok((Box::new(hybrid), selection))
    }

    fn entry(&self, name: &str) -> Option<&BackendEntry<S>> {
        self.entries.iter().find(|e| e.name == name)
    }

    /// The name itself, or what it stands for where it is another system's.
    fn own_name<'a>(&'a self, name: &'a str, notes: &mut Vec<String>) -> Result<&'a str, SelectError> {
        let alias = self.aliases.iter().find(|alias| alias.name == name && self.entry(name).is_none());
        let Some(&Alias { name, target, note }) = alias else { return Ok(name) };
        let target = target.filter(|target| self.entry(target).is_some());
        let Some(target) = target else {
            return Err(SelectError::NoCounterpart { name, why: note, known: self.names() });
        };
        notes.push(format!("{name} stands for {target} here: {note}"));
        Ok(target)
    }

    fn names(&self) -> Vec<&'static str> {
        self.entries.iter().map(|entry| entry.name).collect()
    }

    fn named(&self, name: &str, model: &ModelSpec, device: &S::Device) -> Result<&'static str, SelectError> {
        let unknown = || SelectError::Unknown { name: name.to_owned(), known: self.names() };
        let entry = self.entry(name).ok_or_else(unknown)?;
        match check(entry, model, device) {
            Ok(()) => Ok(entry.name),
            Err(reasons) => Err(SelectError::Unsupported { name: entry.name, reasons }),
        }
    }

    fn select_auto(&self, model: &ModelSpec, device: &S::Device) -> Result<Selection, SelectError> {
        let fits = |e: &&BackendEntry<S>| e.auto && check(e, model, device).is_ok();
        let Some(chosen) = self.entries.iter().find(fits).map(|e| e.name) else {
            return Err(SelectError::NoneFits { rejected: self.others(&[], model, device) });
        };
        let rejected = self.others(&[chosen], model, device);
        Ok(Selection { extend: chosen, decode: chosen, notes: Vec::new(), rejected })
    }

    /// Why each backend that is not among the chosen ones was not.
    fn others(&self, chosen: &[&str], model: &ModelSpec, device: &S::Device) -> Vec<Rejection> {
        let others = self.entries.iter().filter(|e| !chosen.contains(&e.name));
        others
            .map(|entry| {
                let reasons = match check(entry, model, device) {
                    Err(reasons) => reasons,
                    Ok(()) if entry.auto => vec![format!("{} comes first", chosen.join(", "))],
                    Ok(()) => vec!["chosen only by name".to_owned()],
                };
                Rejection { name: entry.name, reasons }
            })
            .collect()
    }
}

fn check<S: Space>(entry: &BackendEntry<S>, model: &ModelSpec, device: &S::Device) -> Result<(), Vec<String>> {
    let capabilities = (entry.capabilities)(device).map_err(|reason| vec![reason.to_string()])?;
    let checked = capabilities.supports_model(model);
    checked.map_err(|reasons| reasons.iter().map(Reason::to_string).collect())
}
