//! A backend for each layer: models whose layers are of several kinds, when no one backend runs them all.
//!
//! Every part plans every batch; a layer's call goes to the part that was made for it.

use std::sync::Arc;

use crate::backend::{AttentionBackend, BatchLimits, check_batch};
use crate::batch::Batch;
use crate::capability::Capabilities;
use crate::capture::{Bucket, CaptureLimits};
use crate::check::check_io;
use crate::error::{CaptureError, CreateError, PrepareError, RunError};
use crate::hybrid::intersection;
use crate::model::ModelSpec;
use crate::plan::PlanReport;
use crate::registry::BoxedBackend;
use crate::space::{Io, Space};
use crate::steps::{Prepared, Steps};

/// Where a layer of the whole model is run.
#[derive(Clone, Copy, Debug)]
struct Route {
    part: usize,
    /// The layer's place in the part's model.
    layer: usize,
}

/// Runs each layer of a model on one of several backends.
pub struct LayerRouter<S: Space> {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    parts: Vec<BoxedBackend<S>>,
    routes: Vec<Route>,
    /// The parts' tickets; empty before the first batch.
    steps: Steps<Vec<Prepared>>,
    /// Where the next tickets are collected.
    next: Vec<Prepared>,
}

impl<S: Space> std::fmt::Debug for LayerRouter<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.routes.iter().map(|route| self.parts[route.part].name()).collect();
        f.debug_struct("LayerRouter").field("layers", &names).finish_non_exhaustive()
    }
}

impl<S: Space> LayerRouter<S> {
    /// Puts together parts, each with the layers of `model` that it runs, in the order in which its own model has
    /// them.
    ///
    /// # Errors
    /// [`CreateError::RoutedLayer`] where a layer is run by no part or by two, or is not the layer that the part was
    /// made for.
    ///
    /// # Panics
    /// If there is no part.
    pub fn new(
        model: Arc<ModelSpec>,
        limits: BatchLimits,
        parts: Vec<(BoxedBackend<S>, Vec<usize>)>,
    ) -> Result<Self, CreateError> {
        let mut routes = vec![None; model.layers().len()];
        for (part, (backend, layers)) in parts.iter().enumerate() {
            let wrong = |layer| CreateError::RoutedLayer { layer, backend: backend.name() };
            for (own, &layer) in layers.iter().enumerate() {
                let is_same = model.layers().get(layer).is_some_and(|l| backend.model().layers().get(own) == Some(l));
                let route = routes.get_mut(layer).filter(|route| is_same && route.is_none()).ok_or(wrong(layer))?;
                *route = Some(Route { part, layer: own });
            }
        }
        let first = parts.first().expect("a router has a part").0.name();
        let unrouted = |layer| CreateError::RoutedLayer { layer, backend: first };
        let routes = routes.into_iter().enumerate().map(|(layer, route)| route.ok_or(unrouted(layer)));
        let routes = routes.collect::<Result<Vec<_>, _>>()?;
        let parts: Vec<_> = parts.into_iter().map(|(backend, _)| backend).collect();
        let common = parts.iter().map(|part| part.capabilities().clone()).reduce(|a, b| intersection(&a, &b));
        let mut capabilities = common.expect("a router has a part");
        // What layers ask for is asked of their own part; only what batches ask for must be common to all.
        let families = parts.iter().flat_map(|part| part.capabilities().families.iter().copied());
        capabilities.families = families.collect();
        capabilities.families.sort_unstable();
        capabilities.families.dedup();
        Ok(Self { model, limits, capabilities, parts, routes, steps: Steps::new(Vec::new()), next: Vec::new() })
    }

    /// The backend of each layer, by name.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &'static str> {
        self.routes.iter().map(|route| self.parts[route.part].name())
    }
}

impl<S: Space> AttentionBackend<S> for LayerRouter<S> {
    fn name(&self) -> &'static str {
        "router"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        // Checked as a whole first, so that no part moves on where another would refuse.
        check_batch(self.name(), batch, &self.model, &self.limits, &self.capabilities)?;
        let Self { parts, steps, next, .. } = self;
        next.clear();
        for part in parts {
            match part.prepare_metadata(batch) {
                Ok(step) => next.push(step),
                Err(error) => {
                    // The parts before this one have moved on, so the previous plan is lost.
                    steps.invalidate();
                    return Err(error);
                }
            }
        }
        steps.prepare(batch, |kept| {
            std::mem::swap(kept, next);
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, S>) -> Result<(), RunError> {
        let tickets = self.steps.get(step)?;
        check_io(&self.model, step, layer, &io)?;
        let Route { part, layer } = self.routes[layer];
        self.parts[part].forward(&tickets[part], layer, io)
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let tickets = self.steps.get(step)?;
        let mut report = PlanReport { groups: Vec::new(), notes: Vec::new() };
        for (part, ticket) in self.parts.iter().zip(tickets) {
            report.absorb(part.explain(ticket)?);
        }
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        let Self { parts, steps, .. } = self;
        let result = parts.iter_mut().try_for_each(|part| part.init_capture_graph(limits));
        // What parts before the one that refuses had captured is gone.
        result.inspect_err(|_| steps.invalidate_all_captured())?;
        steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let Self { parts, steps, .. } = self;
        steps.capture(bucket, |_| parts.iter_mut().map(|part| part.prepare_for_capture(bucket)).collect())
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        check_batch(self.name(), batch, &self.model, &BatchLimits::NONE, &self.capabilities)?;
        let Self { parts, steps, .. } = self;
        let mut has_moved = false;
        let result = steps.replay(step, batch, |tickets, _| {
            parts.iter_mut().zip(tickets).try_for_each(|(part, ticket)| {
                part.prepare_for_replay(ticket, batch)?;
                has_moved = true;
                Ok(())
            })
        });
        // Some parts have the new batch and others the old one: the step is neither's.
        result.inspect_err(|_| {
            if has_moved {
                steps.invalidate_captured(step);
            }
        })
    }
}
