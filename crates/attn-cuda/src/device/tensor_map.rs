//! Owns tensor maps: descriptions of strided tensors from which the device copies boxes by itself.

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

use super::context::Device;
use super::error::{DeviceError, check};

/// A tensor map, passed to kernels by value. The default is none: no kernel may use it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorMap {
    words: [u64; 16],
}

/// What a map describes. Dimensions from the innermost one; 2 to 5 of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapSpec<'a> {
    /// Where the tensor begins; a multiple of 16.
    pub address: u64,
    /// Bytes of an element: 1 or 2.
    pub element_bytes: u32,
    /// Elements in each dimension.
    pub extents: &'a [u64],
    /// Bytes between neighbours, from dimension 1 on; multiples of 16. One fewer than dimensions.
    pub strides: &'a [u64],
    /// Elements of a box in each dimension, at most 256 each; the innermost 128 bytes at most, of a swizzled box.
    pub box_extents: &'a [u32],
    /// Whether boxes are swizzled by 128 bytes in shared memory.
    pub is_swizzled: bool,
}

impl TensorMap {
    /// Encodes a map with zeros outside.
    ///
    /// # Errors
    /// [`DeviceError::Alignment`], and [`DeviceError::Driver`] for what the driver does not accept.
    pub fn encode(device: &Device, spec: &TensorMapSpec<'_>) -> Result<Self, DeviceError> {
        let aligned = |what, bytes: u64| match bytes % 16 {
            0 => Ok(()),
            got => Err(DeviceError::Alignment { what, got, needed: 16 }),
        };
        aligned("a tensor for tensor maps", spec.address)?;
        spec.strides.iter().try_for_each(|&stride| aligned("a stride for tensor maps", stride))?;
        let rank = spec.extents.len();
        let fits = (2..=5).contains(&rank) && spec.strides.len() + 1 == rank && spec.box_extents.len() == rank;
        if !fits || !matches!(spec.element_bytes, 1 | 2) {
            let why = format!("a tensor map of {rank} dimensions and {} bytes an element", spec.element_bytes);
            return Err(DeviceError::Capture { why });
        }
        device.bind()?;
        let data_type = match spec.element_bytes {
            1 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let swizzle = match spec.is_swizzled {
            true => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            false => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let steps = [1u32; 5];
        // SAFETY: the arrays have as many entries as the rank says, which was checked; the map is a local.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                data_type,
                u32::try_from(rank).expect("at most 5"),
                std::ptr::without_provenance_mut(usize::try_from(spec.address).expect("64-bit addresses")),
                spec.extents.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_extents.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("encoding a tensor map", result).map(|()| Self { words: map.opaque })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_128_bytes_at_64() {
        assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 64));
    }
}
