//! Backends by name, and how one is chosen: by name, `"auto"`, several names `"a+b"` of which each layer takes the first
//! that can run it, or a pair `"prefill,decode"` of these.
//!
//! There is no silent fallback: a selection says what was chosen and why each other backend was not.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::backend::{AttentionBackend, BackendConfig};
use crate::capability::{Capabilities, Reason};
use crate::error::CreateError;
use crate::hybrid::HybridBackend;
use crate::model::ModelSpec;
use crate::router::LayerRouter;
use crate::space::Space;

/// A backend of a space, whichever it is.
pub type BoxedBackend<S> = Box<dyn AttentionBackend<S>>;

/// When a backend is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// By `auto` and by name.
    Auto,
    /// By name alone.
    ByName,
    /// By name, and by whoever wants every layer compared with float64: the oracle of what it can run.
    Oracle,
}

/// One backend that can be chosen.
#[derive(Clone, Copy, Debug)]
pub struct BackendEntry<S: Space> {
    /// Its name, lower case, without a comma.
    pub name: &'static str,
    /// One line for tables.
    pub summary: &'static str,
    /// When it is chosen.
    pub role: Role,
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

/// The backend of each layer, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerBackends(Vec<&'static str>);

impl LayerBackends {
    /// The name of each layer's backend.
    #[must_use]
    pub fn of_layers(&self) -> &[&'static str] {
        &self.0
    }

    /// Each backend once with its layers, in order of first use.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, Vec<usize>)> {
        let mut parts: Vec<(&'static str, Vec<usize>)> = Vec::new();
        for (layer, &name) in self.0.iter().enumerate() {
            match parts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, layers)) => layers.push(layer),
                None => parts.push((name, vec![layer])),
            }
        }
        parts
    }
}

impl fmt::Display for LayerBackends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts();
        if let [(name, _)] = parts[..] {
            return f.write_str(name);
        }
        let parts = parts.iter().map(|(name, layers)| match layers.len() {
            1 => format!("{name} (1 layer)"),
            n => format!("{name} ({n} layers)"),
        });
        f.write_str(&parts.collect::<Vec<_>>().join(" + "))
    }
}

/// What was chosen, and what was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Backends for requests that extend.
    pub extend: LayerBackends,
    /// Backends for requests that decode.
    pub decode: LayerBackends,
    /// What to know about the names that were given, where they are another system's.
    pub notes: Vec<String>,
    /// Every other backend with its reasons.
    pub rejected: Vec<Rejection>,
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.extend == self.decode {
            write!(f, "{}", self.extend)?;
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
    #[error(
        "{text:?} is not a backend name, names \"a+b\" of which each layer takes one, a pair \"prefill,decode\" or \"auto\""
    )]
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
    /// None of the named backends can run a layer.
    #[error("no attention backend of those named can run layer {layer}{}", list(rejected))]
    NoneFitsLayer {
        /// The layer.
        layer: usize,
        /// Every named backend with its reasons.
        rejected: Vec<Rejection>,
    },
    /// `auto` found nothing.
    #[error("no attention backend can run this model{}", list(rejected))]
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

    /// Chooses for a model: `choice` is a name, `"auto"`, names `"a+b"` of which each layer takes the first that can run
    /// it, or a pair `"prefill,decode"` of these. `auto` takes the first backend that can run the whole model, and
    /// where there is none, one for each layer.
    ///
    /// # Errors
    /// [`SelectError`], with every reason.
    pub fn select(&self, choice: &str, model: &ModelSpec, device: &S::Device) -> Result<Selection, SelectError> {
        let sides: Vec<_> = choice.split(',').map(str::trim).collect();
        let malformed = || SelectError::Malformed { text: choice.to_owned() };
        let (extend, decode) = match sides[..] {
            [one] => (one, one),
            [extend, decode] => (extend, decode),
            _ => return Err(malformed()),
        };
        let mut notes = Vec::new();
        let mut choose = |side: &str| {
            let names: Vec<_> = side.split('+').map(str::trim).collect();
            if names.iter().any(|name| name.is_empty()) || (names.len() > 1 && names.contains(&"auto")) {
                return Err(malformed());
            }
            let own = names.into_iter().map(|name| self.own_name(name, &mut notes)).collect::<Result<Vec<_>, _>>()?;
            match own[..] {
                ["auto"] => self.select_auto(model, device),
                [name] => Ok(vec![self.named(name, model, device)?; model.layers().len()]),
                _ => self.select_layers(&own, model, device),
            }
        };
        let extend_names = choose(extend)?;
        let decode_names = if decode == extend { extend_names.clone() } else { choose(decode)? };
        let mut chosen: Vec<&str> = Vec::new();
        for name in extend_names.iter().chain(&decode_names) {
            if !chosen.contains(name) {
                chosen.push(name);
            }
        }
        let rejected = self.others(&chosen, model, device);
        Ok(Selection { extend: LayerBackends(extend_names), decode: LayerBackends(decode_names), notes, rejected })
    }

    /// Chooses and makes a backend.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn create(&self, choice: &str, config: &BackendConfig<S>) -> Result<(BoxedBackend<S>, Selection), SelectError> {
        let selection = self.select(choice, &config.model, &config.device)?;
        let extend = self.make(&selection.extend, config)?;
        if selection.extend == selection.decode {
            return Ok((extend, selection));
        }
        let hybrid = HybridBackend::new(extend, self.make(&selection.decode, config)?, config.limits, 1)?;
        Ok((Box::new(hybrid), selection))
    }

    fn make(&self, chosen: &LayerBackends, config: &BackendConfig<S>) -> Result<BoxedBackend<S>, CreateError> {
        let create = |name| self.entry(name).expect("a selection names entries").create;
        let parts = chosen.parts();
        if let [(name, _)] = parts[..] {
            return create(name)(config);
        }
        let part = |(name, layers): (&'static str, Vec<usize>)| {
            let model = config.model.subset(&layers).expect("a part has a layer, and its pages were possible before");
            let config = BackendConfig { model: Arc::new(model), limits: config.limits, device: config.device.clone() };
            let backend = create(name)(&config)?;
            Ok((backend, layers))
        };
        let parts = parts.into_iter().map(part).collect::<Result<Vec<_>, CreateError>>()?;
        Ok(Box::new(LayerRouter::new(Arc::clone(&config.model), config.limits, parts)?))
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

    fn known(&self, name: &str) -> Result<&BackendEntry<S>, SelectError> {
        self.entry(name).ok_or_else(|| SelectError::Unknown { name: name.to_owned(), known: self.names() })
    }

    fn named(&self, name: &str, model: &ModelSpec, device: &S::Device) -> Result<&'static str, SelectError> {
        let entry = self.known(name)?;
        match check(entry, model, device) {
            Ok(()) => Ok(entry.name),
            Err(reasons) => Err(SelectError::Unsupported { name: entry.name, reasons }),
        }
    }

    /// For each layer the first of the named backends that can run it.
    fn select_layers(
        &self,
        names: &[&str],
        model: &ModelSpec,
        device: &S::Device,
    ) -> Result<Vec<&'static str>, SelectError> {
        let entries = names.iter().map(|name| self.known(name)).collect::<Result<Vec<_>, _>>()?;
        let chosen = first_for_each_layer(&entries, model, device);
        chosen.map_err(|(layer, rejected)| SelectError::NoneFitsLayer { layer, rejected })
    }

    fn select_auto(&self, model: &ModelSpec, device: &S::Device) -> Result<Vec<&'static str>, SelectError> {
        let entries: Vec<_> = self.entries.iter().filter(|entry| entry.role == Role::Auto).collect();
        if let Some(entry) = entries.iter().find(|entry| check(entry, model, device).is_ok()) {
            return Ok(vec![entry.name; model.layers().len()]);
        }
        let chosen = first_for_each_layer(&entries, model, device);
        chosen.map_err(|_| SelectError::NoneFits { rejected: self.others(&[], model, device) })
    }

    /// Why each backend that is not among the chosen ones was not.
    fn others(&self, chosen: &[&str], model: &ModelSpec, device: &S::Device) -> Vec<Rejection> {
        let others = self.entries.iter().filter(|e| !chosen.contains(&e.name));
        others
            .map(|entry| {
                let reasons = match check(entry, model, device) {
                    Err(reasons) => reasons,
                    Ok(()) if entry.role == Role::Auto => vec![format!("{} comes first", chosen.join(", "))],
                    Ok(()) => vec!["chosen only by name".to_owned()],
                };
                Rejection { name: entry.name, reasons }
            })
            .collect()
    }
}

/// For each layer the first of the entries that can run it; else the first layer that none can run, with the reasons.
fn first_for_each_layer<S: Space>(
    entries: &[&BackendEntry<S>],
    model: &ModelSpec,
    device: &S::Device,
) -> Result<Vec<&'static str>, (usize, Vec<Rejection>)> {
    let all: Vec<_> = entries.iter().map(|entry| (entry.name, (entry.capabilities)(device))).collect();
    let of_layer = |(index, layer)| {
        let asked = model.requirements(layer);
        let mut rejected = Vec::new();
        for (name, capabilities) in &all {
            let checked = capabilities.as_ref().map_err(|reason| vec![reason.clone()]);
            match checked.and_then(|capabilities| capabilities.supports(&asked)) {
                Ok(()) => return Ok(*name),
                Err(reasons) => {
                    let reasons = reasons.iter().map(Reason::to_string).collect();
                    rejected.push(Rejection { name, reasons });
                }
            }
        }
        Err((index, rejected))
    };
    model.layers().iter().enumerate().map(of_layer).collect()
}

fn list(rejected: &[Rejection]) -> String {
    rejected.iter().map(|r| format!("; not {}: {}", r.name, r.reasons.join(", "))).collect()
}

fn check<S: Space>(entry: &BackendEntry<S>, model: &ModelSpec, device: &S::Device) -> Result<(), Vec<String>> {
    let capabilities = (entry.capabilities)(device).map_err(|reason| vec![reason.to_string()])?;
    let checked = capabilities.supports_model(model);
    checked.map_err(|reasons| reasons.iter().map(Reason::to_string).collect())
}
