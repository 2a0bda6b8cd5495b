//! The rotary embedding in a model's configuration, and the resulting angles.
//!
//! Each of the R/2 pairs is rotated. At position p, pair i turns by the angle p · f(i). With the
//! base θ:
//!
//! | scaling | f(i) |
//! |---|---|
//! | plain | θ^(−2i/R) |
//! | linear | θ^(−2i/R) / factor |
//! | yarn | θ^(−2i/R) · (1 − r(i) + r(i) / factor) |
//!
//! Here r is a ramp from 0 to 1. Let d(β) = R · ln(original / (2πβ)) / (2 ln θ), the pair that
//! turns β times within the original context. The ramp rises from ⌊d(`beta_fast`)⌋ to
//! ⌈d(`beta_slow`)⌉. Pairs that turn fast keep their frequency, and pairs that turn slowly are
//! interpolated (Peng et al., YaRN, arXiv:2309.00071, section 3.2). DeepSeek's models also multiply
//! the cosines and sines by m(`mscale`) / m(`mscale_all_dim`), and the scores by
//! m(`mscale_all_dim`)², with m(s) = 0.1 · s · ln(factor) + 1.

use std::f64::consts::PI;
use std::fmt;

use super::{MAX_DIM, MAX_POSITIONS};
use crate::model::RotaryStyle;
use crate::room::with_room;
use crate::{Error, Result};

/// The rotary embedding of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Rope {
    /// θ: the base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// The longest sequence that the model was made for (`max_position_embeddings`), if the
    /// configuration gives it.
    pub max_positions: Option<u32>,
    /// The elements that form a pair (`rope_interleave`).
    pub style: RotaryStyle,
    /// The extension of the context (`rope_scaling`).
    pub(crate) scaling: RopeScaling,
    /// True if rotary parts are rotated. Otherwise (`mla_use_nope`) their R values take part in the
    /// scores unrotated, and the tables have angles of 0.
    pub rotates: bool,
}

impl Rope {
    /// A rotation without scaling, with DeepSeek's pairs.
    pub const fn plain(theta: f64) -> Self {
        Self {
            theta,
            max_positions: None,
            style: RotaryStyle::Interleaved,
            scaling: RopeScaling::Plain,
            rotates: true,
        }
    }

    /// The same, with rotary parts rotated or not.
    pub const fn with_rotates(self, rotates: bool) -> Self {
        Self { rotates, ..self }
    }

    /// The same with another scaling.
    pub(crate) const fn with_scaling(self, scaling: RopeScaling) -> Self {
        Self { scaling, ..self }
    }

    /// The same with a context that yarn extends by this factor, which scales by frequency. The
    /// rest has the usual defaults: β of 32 and 1, `mscale` 1 and `mscale_all_dim` 0.
    pub const fn with_yarn(self, factor: f64, original_max_positions: Option<u32>) -> Self {
        self.with_scaling(RopeScaling::Yarn(Yarn::new(factor, original_max_positions)))
    }

    /// The same with these weights of both of yarn's corrections. Without yarn it changes nothing.
    pub const fn with_mscale(self, mscale: f64, mscale_all_dim: f64) -> Self {
        match self.scaling {
            RopeScaling::Yarn(yarn) => self.with_scaling(RopeScaling::Yarn(Yarn {
                mscale,
                mscale_all_dim,
                ..yarn
            })),
            _ => self,
        }
    }

    /// The same with another ramp of yarn's. Without yarn it changes nothing.
    pub const fn with_betas(self, beta_fast: f64, beta_slow: f64) -> Self {
        match self.scaling {
            RopeScaling::Yarn(yarn) => self.with_scaling(RopeScaling::Yarn(Yarn {
                beta_fast,
                beta_slow,
                ..yarn
            })),
            _ => self,
        }
    }

    /// The same with a context extended by this factor. Positions are divided by it.
    pub const fn with_linear(self, factor: f64) -> Self {
        self.with_scaling(RopeScaling::Linear { factor })
    }

    /// The same with another pairing of elements.
    pub const fn with_style(self, style: RotaryStyle) -> Self {
        Self { style, ..self }
    }

    /// The same for sequences of at most `max_positions` tokens.
    pub const fn with_max_positions(self, max_positions: u32) -> Self {
        Self {
            max_positions: Some(max_positions),
            ..self
        }
    }

    /// The same with or without yarn's corrections of cosines, sines and scores. Implementations of
    /// one model can disagree about these. Without yarn this changes nothing.
    pub const fn with_applied_scale(self, applies_scale: bool) -> Self {
        match self.scaling {
            RopeScaling::Yarn(yarn) => self.with_scaling(RopeScaling::Yarn(Yarn {
                applies_scale,
                ..yarn
            })),
            _ => self,
        }
    }

    /// The name of a scaling for which this crate has no tables.
    pub(super) const fn without_tables(&self) -> Option<&'static str> {
        match self.scaling {
            RopeScaling::Other { kind } if self.rotates => Some(kind),
            _ => None,
        }
    }

    /// True if the context is extended by yarn.
    pub const fn has_yarn(&self) -> bool {
        matches!(self.scaling, RopeScaling::Yarn(_))
    }

    const fn yarn(&self) -> Option<Yarn> {
        match self.scaling {
            RopeScaling::Yarn(yarn) => Some(yarn),
            _ => None,
        }
    }

    /// The angle per position of each of the R/2 pairs, with R = `width`.
    ///
    /// # Errors
    ///
    /// If `width` is odd or above [`MAX_DIM`], if θ or a factor is not a positive, finite number,
    /// if this crate has no tables for the kind of scaling, or if yarn lacks the original context.
    pub fn frequencies(&self, width: u32) -> Result<Vec<f64>> {
        if width > MAX_DIM || !width.is_multiple_of(2) {
            let accepted = format!("an even number of at most {MAX_DIM}");
            return Err(Error::argument("qk_rope_head_dim", width, accepted));
        }
        if !self.rotates {
            return Ok(vec![0.0; width as usize / 2]);
        }
        self.check_numbers()?;
        let plain = |pair: u32| self.theta.powf(-f64::from(2 * pair) / f64::from(width));
        let pairs = 0..width / 2;
        match self.scaling {
            RopeScaling::Plain => Ok(pairs.map(plain).collect()),
            RopeScaling::Linear { factor } => Ok(pairs.map(|pair| plain(pair) / factor).collect()),
            RopeScaling::Yarn(yarn) => {
                let ramp = yarn.ramp(self.theta, width)?;
                let scaled = |pair: u32| {
                    let keep = (1.0 - ramp.at(pair)) * yarn.extrapolation_factor;
                    plain(pair) * (keep + (1.0 - keep) / yarn.factor)
                };
                Ok(pairs.map(scaled).collect())
            }
            RopeScaling::Other { kind } => Err(Error::argument(
                "rope_scaling.type",
                kind,
                "yarn, linear, default or none: there are no tables of another kind",
            )),
        }
    }

    /// Refuses bases and factors that do not give finite angles.
    fn check_numbers(&self) -> Result<()> {
        let factor = match self.scaling {
            RopeScaling::Linear { factor } | RopeScaling::Yarn(Yarn { factor, .. }) => factor,
            RopeScaling::Plain | RopeScaling::Other { .. } => 1.0,
        };
        for (field, given) in [("rope_theta", self.theta), ("rope_scaling.factor", factor)] {
            if !(given.is_finite() && given > 0.0) {
                let accepted = "a finite number above 0";
                return Err(Error::argument(field, given, accepted));
            }
        }
        Ok(())
    }

    /// The factor of queries and of keys in the softmax. It is 1 without yarn, and otherwise m =
    /// 0.1 · `mscale_all_dim` · ln(`factor`) + 1 for a factor above 1, else 1. It is also 1 if the
    /// configuration gives cosines and sines a factor of 1.
    pub fn softmax_mscale(&self) -> f64 {
        self.yarn().map_or(1.0, Yarn::softmax_mscale)
    }

    /// Returns the factor of cosines and sines. It is 1 without yarn, and otherwise m(`mscale`) /
    /// m(`mscale_all_dim`), or the configuration's own.
    pub fn attention_factor(&self) -> f64 {
        let yarn = self.yarn().filter(|_| self.rotates);
        yarn.map_or(1.0, Yarn::attention_factor)
    }

    /// The cosines and the sines for the positions from 0 up to `positions`, each `[positions,
    /// R/2]` with R = `width`. They are calculated in f64 and rounded once.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::frequencies`]. Also if there are more than 2³¹ − 1 positions, or if
    /// the host lacks memory for the tables.
    pub fn cos_sin(&self, width: u32, positions: usize) -> Result<[Vec<f32>; 2]> {
        let frequencies = self.frequencies(width)?;
        if positions > MAX_POSITIONS as usize {
            let accepted = format!("at most {MAX_POSITIONS}");
            return Err(Error::argument("positions", positions, accepted));
        }
        let factor = self.attention_factor();
        let table = |of: fn(f64) -> f64| -> Result<Vec<f32>> {
            // At most 2³¹ positions of 2¹⁵ pairs.
            let mut values = with_room(positions * frequencies.len())?;
            for position in 0..positions {
                let angle = |frequency: &f64| position as f64 * frequency;
                let row = frequencies.iter().map(angle);
                values.extend(row.map(|angle| (factor * of(angle)) as f32));
            }
            Ok(values)
        };
        Ok([table(f64::cos)?, table(f64::sin)?])
    }
}

impl fmt::Display for Rope {
    /// Gives every number from which the tables are made.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.rotates {
            return f.write_str("none, rotary parts are used as they are");
        }
        let pairs = match self.style {
            RotaryStyle::Interleaved => "interleaved",
            RotaryStyle::Halves => "of halves",
        };
        write!(f, "θ = {}, pairs {pairs}", self.theta)?;
        match self.scaling {
            RopeScaling::Plain => Ok(()),
            RopeScaling::Linear { factor } => write!(f, ", linear by {factor}"),
            RopeScaling::Other { kind } => write!(f, ", {kind} by the engine's tables"),
            RopeScaling::Yarn(yarn) => {
                write!(f, ", yarn by {}", yarn.factor)?;
                if let Some(original) = yarn.original_max_positions {
                    write!(f, " from {original} positions on")?;
                }
                let Yarn {
                    beta_fast: fast,
                    beta_slow: slow,
                    ..
                } = yarn;
                write!(f, " with β of {fast} and {slow}")?;
                write!(
                    f,
                    ", cosines and sines times {:.6}",
                    self.attention_factor()
                )
            }
        }
    }
}

/// The extension of a model's context.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum RopeScaling {
    /// No extension.
    Plain,
    /// Positions are divided by the factor.
    Linear {
        /// The factor by which the context was extended.
        factor: f64,
    },
    /// YaRN: scaled by frequency.
    Yarn(Yarn),
    /// A kind for which this crate has no tables.
    Other {
        /// The name of the scaling: one of [`OTHER_SCALINGS`].
        kind: &'static str,
    },
}

/// The scalings that configurations name, but for which this crate has no tables.
pub(super) const OTHER_SCALINGS: &[&str] = &["dynamic", "longrope", "su", "llama3", "mrope", "ntk"];

/// The yarn extension of the rotary embedding, with every field of `rope_scaling` that affects a
/// number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Yarn {
    /// The factor by which the context was extended (`factor`).
    pub factor: f64,
    /// The context before the extension (`original_max_position_embeddings`, or else
    /// `max_position_embeddings`).
    pub original_max_positions: Option<u32>,
    /// Pairs that turn more often than this within the original context keep their frequency
    /// (`beta_fast`).
    pub beta_fast: f64,
    /// Pairs that turn less often than this within the original context are fully interpolated
    /// (`beta_slow`).
    pub beta_slow: f64,
    /// The weight of the correction of cosines and sines (`mscale`).
    pub mscale: f64,
    /// The weight of the softmax's correction (`mscale_all_dim`); 0 means no correction.
    pub mscale_all_dim: f64,
    /// The factor of cosines and sines, if the configuration gives it directly
    /// (`attention_factor`).
    pub given_attention_factor: Option<f64>,
    /// A multiplier of the derived factor of cosines and sines (`attn_factor`).
    pub attn_factor: f64,
    /// A multiplier of the share of its own frequency that the ramp lets a pair keep
    /// (`extrapolation_factor`).
    pub extrapolation_factor: f64,
    /// True if the ends of the ramp are rounded to whole pairs (`truncate`).
    pub truncate: bool,
    /// True if cosines, sines and scores are corrected at all (`apply_yarn_scaling` or
    /// `apply_scale`).
    pub applies_scale: bool,
}

impl Yarn {
    /// Yarn with the usual defaults.
    pub(super) const fn new(factor: f64, original_max_positions: Option<u32>) -> Self {
        Self {
            factor,
            original_max_positions,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            given_attention_factor: None,
            attn_factor: 1.0,
            extrapolation_factor: 1.0,
            truncate: true,
            applies_scale: true,
        }
    }

    fn softmax_mscale(self) -> f64 {
        match self.given_attention_factor {
            Some(1.0) => 1.0,
            _ => self.correction(self.mscale_all_dim),
        }
    }

    fn attention_factor(self) -> f64 {
        if !self.applies_scale {
            return 1.0;
        }
        let derived = self.correction(self.mscale) / self.correction(self.mscale_all_dim);
        let given = self.given_attention_factor;
        given.unwrap_or(derived * self.attn_factor)
    }

    fn correction(self, weight: f64) -> f64 {
        if self.applies_scale && self.factor > 1.0 {
            0.1 * weight * self.factor.ln() + 1.0
        } else {
            1.0
        }
    }

    fn ramp(self, theta: f64, width: u32) -> Result<Ramp> {
        let Some(original) = self.original_max_positions else {
            return Err(Error::argument(
                "rope_scaling.original_max_position_embeddings",
                "none",
                "the context before yarn extended it",
            ));
        };
        let width = f64::from(width);
        let pair = |turns: f64| {
            width * (f64::from(original) / (2.0 * PI * turns)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        Ok(Ramp {
            low: low.max(0.0),
            high: high.min(width - 1.0),
        })
    }
}

/// The share of interpolation, as a function of the pair.
struct Ramp {
    low: f64,
    high: f64,
}

impl Ramp {
    fn at(&self, pair: u32) -> f64 {
        // A ramp without a width becomes a step. Every published implementation does the same.
        let width = match self.high - self.low {
            0.0 => 0.001,
            width => width,
        };
        ((f64::from(pair) - self.low) / width).clamp(0.0, 1.0)
    }
}

/// The scale factor of queries at position p: 1 + β · ln(1 + ⌊p / original⌋)
/// (`llama_4_scaling_beta`). Within the original context it is 1.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct QueryScaling {
    /// β.
    pub beta: f64,
    /// The original context (`original_max_position_embeddings`). Beyond it the factor grows.
    pub original_max_positions: u32,
}

impl QueryScaling {
    /// A scaling with β and the original context.
    pub const fn new(beta: f64, original_max_positions: u32) -> Self {
        Self {
            beta,
            original_max_positions,
        }
    }

    /// The factor of a query at `position`.
    pub fn factor(self, position: u32) -> f64 {
        let times = position / self.original_max_positions.max(1);
        1.0 + self.beta * f64::from(times).ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelConfig, PRESETS};

    fn preset(name: &str) -> Rope {
        ModelConfig::preset(name).unwrap().rope
    }

    /// The frequency of a pair in the paper's formulation, by the number of turns within the
    /// context.
    fn independent(rope: &Rope, width: u32, pair: u32) -> f64 {
        let exponent = 2.0 * f64::from(pair) / f64::from(width);
        let plain = (-exponent * rope.theta.ln()).exp();
        let yarn = match rope.scaling {
            RopeScaling::Plain => return plain,
            RopeScaling::Linear { factor } => return plain / factor,
            RopeScaling::Yarn(yarn) => yarn,
            RopeScaling::Other { .. } => unreachable!(),
        };
        let original = f64::from(yarn.original_max_positions.unwrap());
        // The pair whose wavelength fits the context `turns` times: 2π·θ^(2d/R) = original / turns.
        let pair_of = |turns: f64| {
            (original / turns / std::f64::consts::TAU).log(rope.theta) * f64::from(width) / 2.0
        };
        let low = pair_of(yarn.beta_fast).floor().max(0.0);
        let high = pair_of(yarn.beta_slow).ceil().min(f64::from(width) - 1.0);
        let extrapolated = match f64::from(pair) {
            pair if pair <= low => 1.0,
            pair if pair >= high => 0.0,
            pair => (high - pair) / (high - low),
        };
        plain / yarn.factor * (1.0 - extrapolated) + plain * extrapolated
    }

    #[test]
    fn frequencies_are_those_of_the_paper() {
        let models = ["deepseek-v2", "deepseek-v3", "kimi-k2", "glm-5"].map(preset);
        let linear = Rope::plain(5e5).with_linear(4.0);
        for rope in models.into_iter().chain([linear, Rope::plain(1e4)]) {
            for width in [32, 64] {
                let given = rope.frequencies(width).unwrap();
                assert_eq!(given.len(), width as usize / 2);
                for (pair, given) in given.into_iter().enumerate() {
                    let expected = independent(&rope, width, pair as u32);
                    assert!((given / expected - 1.0).abs() < 1e-13, "{rope:?} {pair}");
                }
            }
        }
    }

    #[test]
    fn known_frequencies_of_deepseek_v3() {
        // d(32) = 64·ln(4096/64π)/(2·ln 10⁴) = 10.47 and d(1) = 22.51: the ramp is 10..23.
        let given = preset("deepseek-v3").frequencies(64).unwrap();
        // 10^(−1.25), as before; 0.01·(7/13 + 6/13/40); 10^(−2.875)/40; 10^(−3.875)/40.
        for (pair, expected) in [
            (0, 1.0),
            (10, 0.056_234_132_519_034_91),
            (16, 0.005_5),
            (23, 3.333_803_580_408_31e-5),
            (31, 3.333_803_580_408_31e-6),
        ] {
            let given: f64 = given[pair];
            assert!((given / expected - 1.0).abs() < 1e-12, "{pair}: {given}");
        }
    }

    #[test]
    fn tables_are_the_functions_of_each_angle() {
        let [cos, sin] = Rope::plain(1e4).cos_sin(4, 3).unwrap();
        // Frequencies 1 and 0.01.
        let expected = [1.0, 1.0, 0.540_302_3, 0.999_95, -0.416_146_84, 0.999_8];
        for (given, expected) in cos.iter().zip(expected) {
            assert!((given - expected).abs() < 1e-7, "{given} {expected}");
        }
        let expected = [
            0.0,
            0.0,
            0.841_471,
            0.009_999_833,
            0.909_297_4,
            0.019_998_667,
        ];
        for (given, expected) in sin.iter().zip(expected) {
            assert!((given - expected).abs() < 1e-7, "{given} {expected}");
        }
        // A distant position, where a product in f32 would be off by more than 0.01.
        let rope = preset("deepseek-v3");
        let [cos, _] = rope.cos_sin(64, 160_000).unwrap();
        let frequencies = rope.frequencies(64).unwrap();
        for (pair, frequency) in frequencies.iter().enumerate() {
            let expected = (159_999.0 * frequency).cos() as f32;
            assert_eq!(cos[159_999 * 32 + pair], expected);
        }
    }

    #[test]
    fn the_factors_of_yarn() {
        let yarn = Rope::plain(1e4).with_yarn(40.0, Some(4096));
        // 0.1·ln 40 + 1.
        let m = 1.368_887_945_411_393_6;
        assert!((yarn.attention_factor() - m).abs() < 1e-15);
        assert_eq!(yarn.softmax_mscale(), 1.0);
        let both = yarn.with_mscale(1.0, 1.0);
        assert_eq!(both.attention_factor(), 1.0);
        assert!((both.softmax_mscale() - m).abs() < 1e-15);
        let given = Yarn {
            given_attention_factor: Some(1.5),
            ..both.yarn().unwrap()
        };
        assert_eq!(given.attention_factor(), 1.5);
        for factor in [1.0, 0.5] {
            let none = Rope::plain(1e4)
                .with_yarn(factor, None)
                .with_mscale(1.0, 0.5);
            assert_eq!((none.attention_factor(), none.softmax_mscale()), (1.0, 1.0));
        }
        let [cos, sin] = yarn.cos_sin(2, 1).unwrap();
        assert_eq!((cos[0], sin[0]), (m as f32, 0.0));
    }

    #[test]
    fn every_number_is_shown() {
        for (model, shown) in [
            ("glm-5", "θ = 1000000, pairs interleaved"),
            (
                "deepseek-v3",
                "θ = 10000, pairs interleaved, yarn by 40 from 4096 positions on with β of 32 \
                 and 1, cosines and sines times 1.000000",
            ),
            (
                "minicpm3",
                "θ = 10000, pairs of halves, longrope by the engine's tables",
            ),
            ("kimi-linear-48b", "none, rotary parts are used as they are"),
        ] {
            assert_eq!(preset(model).to_string(), shown);
        }
        let linear = Rope::plain(1e4).with_linear(2.0).to_string();
        assert_eq!(linear, "θ = 10000, pairs interleaved, linear by 2");
    }

    #[test]
    fn what_has_no_tables_is_refused_by_name() {
        assert_eq!(
            preset("minicpm3").frequencies(32).unwrap_err().to_string(),
            "rope_scaling.type: given longrope, accepted yarn, linear, default or none: there are \
             no tables of another kind"
        );
        let bare = Rope::plain(1e4).with_yarn(2.0, None);
        assert_eq!(
            bare.frequencies(64).unwrap_err().to_string(),
            "rope_scaling.original_max_position_embeddings: given none, accepted the context \
             before yarn extended it"
        );
        let odd = Rope::plain(1e4).frequencies(3).unwrap_err();
        assert_eq!(
            odd.to_string(),
            "qk_rope_head_dim: given 3, accepted an even number of at most 65536"
        );
        let without = PRESETS.iter().filter(|preset| {
            let model = preset.config();
            model.is_ok_and(|it| it.rope.frequencies(it.dims.head.rope).is_err())
        });
        let names: Vec<&str> = without.map(|preset| preset.name).collect();
        assert_eq!(names, ["minicpm3"]);
    }

    fn read(rope: &str) -> Result<Rope> {
        let json = format!(
            r#"{{"num_attention_heads": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16, "v_head_dim": 32, {rope}}}"#
        );
        ModelConfig::from_hf_config(&json).map(|config| config.rope)
    }

    #[test]
    fn every_field_of_a_configuration_is_kept() {
        let full = read(
            r#""rope_theta": 50000, "max_position_embeddings": 1000, "rope_interleave": false,
               "rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2,
               "original_max_position_embeddings": 500, "mscale": 0.5, "mscale_all_dim": 0.25,
               "attention_factor": 1.25, "truncate": false, "attn_factor": 0.5,
               "extrapolation_factor": 0.75, "apply_yarn_scaling": false}"#,
        );
        let yarn = Yarn {
            factor: 8.0,
            original_max_positions: Some(500),
            beta_fast: 16.0,
            beta_slow: 2.0,
            mscale: 0.5,
            mscale_all_dim: 0.25,
            given_attention_factor: Some(1.25),
            attn_factor: 0.5,
            extrapolation_factor: 0.75,
            truncate: false,
            applies_scale: false,
        };
        let expected = Rope::plain(5e4)
            .with_max_positions(1000)
            .with_style(RotaryStyle::Halves)
            .with_scaling(RopeScaling::Yarn(yarn));
        assert_eq!(full, Ok(expected));
        let inside = read(r#""rope_parameters": {"rope_type": "default", "rope_theta": 2e4}"#);
        assert_eq!(inside, Ok(Rope::plain(2e4)));
        let linear = read(r#""rope_scaling": {"type": "linear", "factor": 4}"#);
        assert_eq!(linear, Ok(Rope::plain(1e4).with_linear(4.0)));
        let still = read(r#""mla_use_nope": true"#);
        assert_eq!(still, Ok(Rope::plain(1e4).with_rotates(false)));
    }

    #[test]
    fn fields_that_give_no_rotation_are_refused() {
        for (rope, message) in [
            (
                r#""rope_theta": 1"#,
                "rope_theta: given 1, accepted a number above 1",
            ),
            (
                r#""rope_interleave": 1"#,
                "rope_interleave: given 1, accepted true or false",
            ),
            (
                r#""rope_scaling": {"type": "linear"}"#,
                "factor: given nothing as rope_scaling.factor, accepted a number above 0",
            ),
            (
                r#""rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 0}"#,
                "rope_scaling.beta_slow: given 0, accepted a number above 0",
            ),
            (
                r#""rope_scaling": {"type": "yarn", "factor": 2, "llama_4_scaling_beta": -0.1}"#,
                "rope_scaling.llama_4_scaling_beta: given -0.1, accepted a number, at least 0",
            ),
            (
                r#""rope_scaling": {"type": "yarn", "factor": 2, "apply_scale": 0}"#,
                "rope_scaling.apply_scale: given 0, accepted true or false",
            ),
            (
                r#""rope_scaling": {"factor": 2}"#,
                "type: given nothing as rope_scaling.type or rope_scaling.rope_type, \
                 accepted a string; \"yarn\" if mscale_all_dim is to apply",
            ),
        ] {
            assert_eq!(read(rope).unwrap_err().to_string(), message);
        }
    }
}
