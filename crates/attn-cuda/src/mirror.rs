//! Owns copies between main memory and the device: activations without their gaps, caches with or without theirs.

use kvpool::{
    HostKv, HostSlice, HostSliceMut, HostTensor, HostTensorMut, KvLayout, KvPlaneLayout, KvShape, PageId, Values,
};

use crate::device::{CudaKv, CudaKvError, Device, DeviceBuffer, DeviceError};

/// The bytes of a tensor, row by row, head by head, without gaps.
pub(crate) fn pack(tensor: &HostTensor<'_>) -> Vec<u8> {
    let [rows, heads, dim] = tensor.shape();
    let size = tensor.dtype().size_bytes();
    let data = bytes_of(tensor.data());
    let mut packed = Vec::with_capacity(packed_bytes(tensor));
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let begin = tensor.offset(row, head) * size;
        packed.extend_from_slice(&data[begin..begin + dim * size]);
    }
    packed
}

/// How many bytes that are.
pub(crate) fn packed_bytes(tensor: &HostTensor<'_>) -> usize {
    tensor.shape().into_iter().product::<usize>() * tensor.dtype().size_bytes()
}

/// The other way round.
pub(crate) fn unpack(packed: &[u8], tensor: &mut HostTensorMut<'_>) {
    let [rows, heads, dim] = tensor.shape();
    let size = tensor.dtype().size_bytes();
    let len = dim * size;
    let positions = (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head)));
    let begins: Vec<usize> = positions.map(|(row, head)| tensor.offset(row, head) * size).collect();
    let mut data = tensor.data_mut();
    let data = bytes_of_mut(&mut data);
    for (from, begin) in packed.chunks_exact(len.max(1)).zip(begins) {
        data[begin..begin + len].copy_from_slice(from);
    }
}

fn bytes_of(data: HostSlice<'_>) -> &[u8] {
    match data {
        HostSlice::F32(data) => bytemuck::must_cast_slice(data),
        HostSlice::F16(data) => bytemuck::must_cast_slice(data),
        HostSlice::Bf16(data) => bytemuck::must_cast_slice(data),
    }
}

fn bytes_of_mut<'a>(data: &'a mut HostSliceMut<'_>) -> &'a mut [u8] {
    match data {
        HostSliceMut::F32(data) => bytemuck::must_cast_slice_mut(data),
        HostSliceMut::F16(data) => bytemuck::must_cast_slice_mut(data),
        HostSliceMut::Bf16(data) => bytemuck::must_cast_slice_mut(data),
    }
}

/// A cache's copy on the device.
#[derive(Debug)]
pub(crate) struct CacheMirror {
    kv: CudaKv,
    /// Strides on the host.
    planes: [KvPlaneLayout; 2],
    /// Whether the copy has other strides: those of the host are such that kernels could not read it in vectors.
    is_repacked: bool,
}

impl CacheMirror {
    /// Room for a copy, of anything: see [`upload`](Self::upload).
    pub(crate) fn new(device: &Device, host: &HostKv) -> Result<Self, DeviceError> {
        let planes = [host.k().layout, host.v().layout];
        let kv = CudaKv::like_host(device, host)?;
        if kv.require_aligned().is_ok() {
            return Ok(Self { kv, planes, is_repacked: false });
        }
        let KvShape { num_pages, page_size, .. } = host.shape();
        let kv = CudaKv::for_spec(device, host.spec(), num_pages, page_size, KvLayout::Nhd, host.format());
        let kv = match (kv.map_err(device_error)?, host.spec().values) {
            // Columns stay where they are: K, which holds them, is copied whole.
            (kv, Values::InKeys(_)) => kv.with_value_column(planes[1].offset - planes[0].offset),
            (kv, _) => kv,
        };
        Ok(Self { kv, planes, is_repacked: true })
    }

    pub(crate) const fn kv(&self) -> &CudaKv {
        &self.kv
    }

    pub(crate) const fn kv_mut(&mut self) -> &mut CudaKv {
        &mut self.kv
    }

    /// Whether another cache can be copied here.
    pub(crate) fn fits(&self, host: &HostKv) -> bool {
        let is_same = (self.kv.spec(), self.kv.shape(), self.kv.format()) == (host.spec(), host.shape(), host.format());
        is_same && self.planes == [host.k().layout, host.v().layout]
    }

    /// Copies a cache that fits to the device.
    pub(crate) fn upload(&mut self, host: &HostKv) -> Result<(), DeviceError> {
        let bytes = host.buffer().as_slice().as_bytes();
        if !self.is_repacked {
            return self.kv.upload(0, bytes);
        }
        let mut packed = vec![0; self.buffer().len()];
        for (from, to, len) in self.moves() {
            packed[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        self.kv.upload(0, &packed)
    }

    /// Copies the device's pages back.
    pub(crate) fn download(&self, host: &mut HostKv) -> Result<(), DeviceError> {
        let bytes = host.buffer_mut().into_bytes();
        if !self.is_repacked {
            return self.buffer().download(0, bytes);
        }
        let mut packed = vec![0; self.buffer().len()];
        self.buffer().download(0, &mut packed)?;
        for (to, from, len) in self.moves() {
            bytes[to..to + len].copy_from_slice(&packed[from..from + len]);
        }
        Ok(())
    }

    fn buffer(&self) -> &DeviceBuffer {
        self.kv.buffer().expect("a mirror has its own memory")
    }

    /// Every head vector: its byte on the host, its byte on the device, bytes.
    fn moves(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let size = self.kv.format().dtype().element_bytes();
        let shape = self.kv.shape();
        let pairs = [(self.planes[0], self.kv.k()), (self.planes[1], self.kv.v())];
        let pairs = own_planes(pairs, self.kv.spec().values);
        pairs.flat_map(move |(host, device)| {
            vectors(shape).map(move |(page, token, head)| {
                let at = |plane: &KvPlaneLayout| plane.element(page, token, head) * size;
                (at(&host), at(&device), host.head_dim * size)
            })
        })
    }
}

/// Those of the planes of K and V that have memory of their own: values in the keys are copied with them.
fn own_planes<T>([k, v]: [T; 2], values: Values) -> impl Iterator<Item = T> {
    let v = (!matches!(values, Values::InKeys(_))).then_some(v);
    std::iter::once(k).chain(v)
}

fn vectors(shape: KvShape) -> impl Iterator<Item = (PageId, u32, u32)> {
    let pages = (0..shape.num_pages).filter_map(PageId::new);
    pages.flat_map(move |page| {
        (0..shape.page_size.get()).flat_map(move |token| (0..shape.num_kv_heads).map(move |head| (page, token, head)))
    })
}

fn device_error(error: CudaKvError) -> DeviceError {
    match error {
        CudaKvError::Device(error) => error,
        // A host cache's shape was validated when it was made.
        CudaKvError::Shape(error) => DeviceError::Capture { why: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_the_keys_are_copied_with_them_alone() {
        let of = |values| own_planes(["k", "v"], values).collect::<Vec<_>>();
        assert_eq!(of(Values::Own(64)), ["k", "v"]);
        assert_eq!(of(Values::InKeys(64)), ["k"]);
    }

    #[test]
    fn gaps_are_left_out_and_put_back() {
        let data: Vec<f32> = (0..40u16).map(f32::from).collect();
        let tensor = HostTensor::strided(&data[1..], [3, 2, 4], 12, 5).unwrap();
        let packed = pack(&tensor);
        assert_eq!(packed.len(), packed_bytes(&tensor));
        let values: Vec<f32> = packed.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(&values[..8], [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0]);
        let mut back = [-1f32; 40];
        unpack(&packed, &mut HostTensorMut::strided(&mut back[1..], [3, 2, 4], 12, 5).unwrap());
        let again = HostTensor::strided(&back[1..], [3, 2, 4], 12, 5).unwrap();
        assert_eq!(pack(&again), packed);
        assert_eq!((back[0], back[5], back[10]), (-1.0, -1.0, -1.0));
    }
}
