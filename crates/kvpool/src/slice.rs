//! Owns the element types of activations ([`Dtype`]) and borrowed elements of one of them ([`HostSlice`],
//! [`HostSliceMut`]), so that a view can be of any dtype without a type parameter.
//! Does not know shapes; [`crate::HostTensor`] does.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

/// A name that stands for none of the known things.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} \"{name}\", expected one of {expected}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    expected: &'static str,
}

impl UnknownName {
    pub(crate) fn new(what: &'static str, name: &str, expected: &'static str) -> UnknownName {
        UnknownName { what, name: name.to_owned(), expected }
    }
}

/// The element type of an activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// All element types.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// The name in files and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Dtype, UnknownName> {
        Dtype::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownName::new("dtype", name, "f32, f16, bf16"))
    }
}

/// Borrowed elements of one of the activation dtypes.
#[derive(Debug, Clone, Copy)]
pub enum HostSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl HostSlice<'_> {
    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        match self {
            HostSlice::F32(_) => Dtype::F32,
            HostSlice::F16(_) => Dtype::F16,
            HostSlice::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            HostSlice::F32(data) => data.len(),
            HostSlice::F16(data) => data.len(),
            HostSlice::Bf16(data) => data.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Mutably borrowed elements of one of the activation dtypes.
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

impl HostSliceMut<'_> {
    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.as_slice().dtype()
    }

    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements, to read.
    #[must_use]
    pub const fn as_slice(&self) -> HostSlice<'_> {
        match self {
            HostSliceMut::F32(data) => HostSlice::F32(data),
            HostSliceMut::F16(data) => HostSlice::F16(data),
            HostSliceMut::Bf16(data) => HostSlice::Bf16(data),
        }
    }

    /// The same elements, borrowed for less long.
    pub const fn reborrow(&mut self) -> HostSliceMut<'_> {
        match self {
            HostSliceMut::F32(data) => HostSliceMut::F32(data),
            HostSliceMut::F16(data) => HostSliceMut::F16(data),
            HostSliceMut::Bf16(data) => HostSliceMut::Bf16(data),
        }
    }
}

macro_rules! slice_from {
    ($element:ty, $variant:ident) => {
        impl<'a> From<&'a [$element]> for HostSlice<'a> {
            fn from(data: &'a [$element]) -> Self {
                HostSlice::$variant(data)
            }
        }

        impl<'a> From<&'a Vec<$element>> for HostSlice<'a> {
            fn from(data: &'a Vec<$element>) -> Self {
                HostSlice::$variant(data)
            }
        }

        impl<'a> From<&'a mut [$element]> for HostSliceMut<'a> {
            fn from(data: &'a mut [$element]) -> Self {
                HostSliceMut::$variant(data)
            }
        }

        impl<'a> From<&'a mut Vec<$element>> for HostSliceMut<'a> {
            fn from(data: &'a mut Vec<$element>) -> Self {
                HostSliceMut::$variant(data)
            }
        }
    };
}

slice_from!(f32, F32);
slice_from!(f16, F16);
slice_from!(bf16, Bf16);
