//! Owns [`FamilyOracle`]: the results of layers that the plain oracle does not know, from the oracles of their families.

use attn_metadata::{Batch, BoxedBackend, Host, Io, Layer, Lse, Prepared};
use half::{bf16, f16};
use kvpool::{Dtype, HostTensor, HostTensorMut};

/// A backend made for the same model that runs each family's layers on its oracle.
pub(super) struct FamilyOracle {
    backend: BoxedBackend<Host>,
    /// The number of the sample that the oracle was asked to prepare last.
    sample: u64,
    /// Its step, where the oracle could prepare it.
    step: Option<Prepared>,
    out: Rows,
    side_out: Rows,
    lse: Vec<Lse>,
}

/// Output rows of any dtype.
#[derive(Default)]
struct Rows {
    f32: Vec<f32>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}

impl Rows {
    fn view(&mut self, dtype: Dtype, shape: [usize; 3]) -> HostTensorMut<'_> {
        let len = shape.iter().product();
        let view = match dtype {
            Dtype::F32 => HostTensorMut::packed(sized(&mut self.f32, len), shape),
            Dtype::F16 => HostTensorMut::packed(sized(&mut self.f16, len), shape),
            Dtype::Bf16 => HostTensorMut::packed(sized(&mut self.bf16, len), shape),
        };
        view.expect("as many elements as the shape has")
    }
}

fn sized<T: Clone + Default>(data: &mut Vec<T>, len: usize) -> &mut [T] {
    data.clear();
    data.resize(len, T::default());
    data
}

impl FamilyOracle {
    pub(super) fn new(backend: BoxedBackend<Host>) -> Self {
        Self { backend, sample: 0, step: None, out: Rows::default(), side_out: Rows::default(), lse: Vec::new() }
    }

    /// Prepares the batch of a sample, which attends only, unless it is the one prepared last: captured steps and the
    /// last other one are all live, and run in any order.
    pub(super) fn prepare(&mut self, sample: u64, batch: &Batch) {
        if self.sample != sample {
            self.sample = sample;
            self.step = self.backend.prepare_metadata(batch).ok();
        }
    }

    /// Outputs and LSEs `[rows, heads, width]`, `[rows, heads]` of a layer over the caches as they are, of the batch that
    /// was prepared last; `None` where the oracle refuses the step or the call.
    pub(super) fn attend(&mut self, layer: usize, spec: &Layer, io: &mut Io<'_, Host>) -> Option<(Vec<f64>, Vec<f64>)> {
        let Self { backend, step, out, side_out, lse, .. } = self;
        let (dtype, [rows, heads, _]) = (io.q.dtype(), io.q.shape());
        let shape = [rows, heads, spec.heads().head_dim_vo as usize];
        lse.clear();
        lse.resize(rows * heads, Lse::EMPTY);
        let mut call = io.attending();
        call.out = out.view(dtype, shape);
        call.lse = Some(&mut lse[..]);
        if let Some(old) = call.side.as_mut().and_then(|side| side.out.as_mut()) {
            let shape = old.shape();
            *old = side_out.view(dtype, shape);
        }
        backend.forward(step.as_ref()?, layer, call).ok()?;
        Some((widened(&out.view_of(dtype, shape)), lse.iter().map(|lse| f64::from(lse.ln())).collect()))
    }
}

impl Rows {
    fn view_of(&self, dtype: Dtype, shape: [usize; 3]) -> HostTensor<'_> {
        let view = match dtype {
            Dtype::F32 => HostTensor::packed(&self.f32[..], shape),
            Dtype::F16 => HostTensor::packed(&self.f16[..], shape),
            Dtype::Bf16 => HostTensor::packed(&self.bf16[..], shape),
        };
        view.expect("as many elements as the shape has")
    }
}

fn widened(tensor: &HostTensor<'_>) -> Vec<f64> {
    let [rows, heads, dim] = tensor.shape();
    let mut vector = vec![0.0; dim];
    let mut all = Vec::with_capacity(rows * heads * dim);
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        tensor.read(row, head, &mut vector);
        all.extend(vector.iter().map(|&x| f64::from(x)));
    }
    all
}
