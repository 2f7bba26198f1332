//! Canonical CBOR (RFC 8949, core deterministic encoding) of hash inputs: shortest integers and floats, definite lengths.
//!
//! Object identity plays no part here, so a value that stands in several places is written in each.

use super::extra_key::{ExtraKeys, KeyId, Value};
use super::{BlockInput, Encoder};
use crate::error::{Error, Result};

/// Longest encoding of one block's extra keys in bytes: tuples that share their items double with every level of nesting.
const MAX_EXTRA: usize = 1 << 26;

const UNSIGNED: u8 = 0;
const NEGATIVE: u8 = 1;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const TAG: u8 = 6;

const TAG_BIG_UNSIGNED: u64 = 2;
const TAG_BIG_NEGATIVE: u64 = 3;

const FALSE: u8 = 0xf4;
const TRUE: u8 = 0xf5;
const NULL: u8 = 0xf6;
const HALF: u8 = 0xf9;
const SINGLE: u8 = 0xfa;
const DOUBLE: u8 = 0xfb;
/// The one not-a-number, whatever its sign and payload.
const NAN: [u8; 3] = [HALF, 0x7e, 0x00];

/// Writes CBOR into one buffer that is used again for each input.
#[derive(Debug, Default)]
pub(super) struct CborWriter {
    out: Vec<u8>,
    /// The extra keys must not reach beyond this.
    limit: usize,
}

impl Encoder for CborWriter {
    fn block(&mut self, input: &BlockInput<'_>) -> Result<&[u8]> {
        self.out.clear();
        self.head(ARRAY, 3);
        self.byte_string(BYTES, input.parent.as_bytes());
        self.head(ARRAY, input.tokens.len() as u64);
        for token in input.tokens {
            self.int(*token);
        }
        self.limit = self.out.len() + MAX_EXTRA;
        match input.extra {
            Some((keys, id)) => self.save(keys, id)?,
            None => self.out.push(NULL),
        }
        Ok(&self.out)
    }

    fn text(&mut self, text: &str) -> &[u8] {
        self.out.clear();
        self.byte_string(TEXT, text.as_bytes());
        &self.out
    }
}

impl CborWriter {
    /// A major type and its argument in the fewest bytes.
    #[inline]
    fn head(&mut self, major: u8, argument: u64) {
        let major = major << 5;
        let bytes = argument.to_be_bytes();
        // The matched ranges say how many of the bytes are significant.
        match argument {
            0..=23 => self.out.push(major | bytes[7]),
            24..=0xff => self.out.extend_from_slice(&[major + 24, bytes[7]]),
            0x100..=0xffff => self.out.extend_from_slice(&[major + 25, bytes[6], bytes[7]]),
            0x1_0000..=0xffff_ffff => {
                self.out.extend_from_slice(&[major + 26, bytes[4], bytes[5], bytes[6], bytes[7]]);
            }
            _ => {
                self.out.push(major + 27);
                self.out.extend_from_slice(&bytes);
            }
        }
    }

    fn byte_string(&mut self, major: u8, payload: &[u8]) {
        self.head(major, payload.len() as u64);
        self.out.extend_from_slice(payload);
    }

    #[inline]
    fn int(&mut self, value: i64) {
        // A negative n is written as -1 - n, which is its bits turned over.
        let (major, argument) = if value < 0 { (NEGATIVE, !value) } else { (UNSIGNED, value) };
        self.head(major, argument.cast_unsigned());
    }

    /// An integer beyond 64 bits with sign, from two's complement, little endian.
    fn big_int(&mut self, digits: &[u8]) {
        let negative = digits.last().is_some_and(|last| *last >= 0x80);
        let flip = if negative { 0xff } else { 0x00 };
        let significant = digits.iter().rposition(|digit| digit ^ flip != 0).map_or(0, |last| last + 1);
        let magnitude = digits[..significant].iter().rev().map(|digit| digit ^ flip);
        if significant <= 8 {
            let argument = magnitude.fold(0, |sum, digit| sum << 8 | u64::from(digit));
            return self.head(if negative { NEGATIVE } else { UNSIGNED }, argument);
        }
        self.head(TAG, if negative { TAG_BIG_NEGATIVE } else { TAG_BIG_UNSIGNED });
        self.head(BYTES, significant as u64);
        self.out.extend(magnitude);
    }

    fn float(&mut self, value: f64) {
        if value.is_nan() {
            return self.out.extend_from_slice(&NAN);
        }
        #[allow(clippy::cast_possible_truncation, reason = "used only if nothing is lost")]
        let single = value as f32;
        if f64::from(single).to_bits() != value.to_bits() {
            self.out.push(DOUBLE);
            self.out.extend_from_slice(&value.to_be_bytes());
        } else if let Some(half) = half_bits(single) {
            self.out.push(HALF);
            self.out.extend_from_slice(&half.to_be_bytes());
        } else {
            self.out.push(SINGLE);
            self.out.extend_from_slice(&single.to_be_bytes());
        }
    }

    /// A value of the extra keys. Recursion is bounded by [`super::MAX_NESTING`].
    fn save(&mut self, keys: &ExtraKeys, id: KeyId) -> Result<()> {
        match keys.value(id) {
            Value::None => self.out.push(NULL),
            Value::Bool(value) => self.out.push(if value { TRUE } else { FALSE }),
            Value::Int(value) => self.int(value),
            Value::BigInt(digits) => self.big_int(digits),
            Value::Float(value) => self.float(value),
            Value::Str(text) => self.byte_string(TEXT, text),
            Value::Bytes(bytes) => self.byte_string(BYTES, bytes),
            Value::Tuple(items) => {
                self.head(ARRAY, items.len() as u64);
                items.iter().try_for_each(|item| self.save(keys, *item))?;
            }
        }
        if self.out.len() > self.limit {
            return Err(Error::config(format!("the keys are longer than {MAX_EXTRA} bytes in all")));
        }
        Ok(())
    }
}

/// The half-precision form of a number, if nothing is lost by it. Not for NaN.
fn half_bits(value: f32) -> Option<u16> {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let (exponent, fraction) = (bits >> 23 & 0xff, bits & 0x007f_ffff);
    let magnitude = match exponent {
        0 if fraction == 0 => 0,
        0xff => 0x7c00,
        // Normal: 2**-14 to below 2**16, with 10 bits of fraction.
        113..=142 if fraction.trailing_zeros() >= 13 => (exponent - 112) << 10 | fraction >> 13,
        // Subnormal: a multiple of 2**-24 below 2**-14. The leading one becomes part of the fraction.
        103..=112 => {
            let (whole, dropped) = (fraction | 0x0080_0000, 126 - exponent);
            if whole.trailing_zeros() < dropped {
                return None;
            }
            whole >> dropped
        }
        _ => return None,
    };
    u16::try_from(sign | magnitude).ok()
}
