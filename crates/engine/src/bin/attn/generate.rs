//! `attn generate`: a real model, continuous batching over paged KV, text as it comes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use attn_metadata::HostDevice;
use attn_reference::verify::VerifyReport;
use clap::Args as ClapArgs;
use engine::lm::LanguageModel;
use engine::model::random::RandomModel;
use engine::model::{Message, Model, SpecialTokens};
use engine::report::chosen;
use engine::sample::SamplingParams;
use engine::serve::{RequestSpec, SchedulerConfig, Session, SessionConfig, Stats, SubmitError};
use indicatif::{ProgressBar, ProgressStyle};
use kvpool::{ExtraKey, KvDtype, KvFormat, KvScales, PageSize, PrefixConfig};

use super::cases::{self, Cases};
use super::stream::TextStreams;
use super::traffic::{Answer, Traffic};
use super::{Failure, Outcome, logits, output, random};

/// Generates text with a GGUF model.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// The model: a GGUF file of a Llama-family or Gemma 3 model
    #[arg(long, value_name = "FILE", required_unless_present = "random_model")]
    model: Option<PathBuf>,
    /// A model of random weights in place of a file: minimax or mla. Tokens are bytes; what comes out is token ids.
    #[arg(long, value_name = "KIND", conflicts_with_all = ["model", "cases", "chat", "system"])]
    pub(super) random_model: Option<RandomModel>,
    /// Seed of the random weights.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "random_model")]
    pub(super) model_seed: u64,
    /// A prompt; give it several times for a batch.
    #[arg(long, value_name = "TEXT", conflicts_with = "cases")]
    pub(super) prompt: Vec<String>,
    /// Prompts with the tokens that they must give (JSON); exit 1 on the first difference of each.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["chat", "system", "max_new_tokens"])]
    cases: Option<PathBuf>,
    /// With --cases: a token may be another one where the recorded margin to the runner-up is at most X logits; what
    /// follows it is not compared.
    #[arg(long, value_name = "X", default_value_t = 0.0, requires = "cases")]
    min_margin: f32,
    /// Run each prompt alone on this backend too, and compare the logits of every step; exit 1 where they are farther
    /// apart than --max-logit-error.
    #[arg(long, value_name = "NAME", conflicts_with = "random_model")]
    logits_like: Option<String>,
    /// Largest relative error (L2) of a step's logits, for --logits-like.
    #[arg(long, value_name = "X", default_value_t = 2e-2, requires = "logits_like")]
    max_logit_error: f64,
    /// Wrap each prompt as a user's message in the model's chat template.
    #[arg(long)]
    chat: bool,
    /// A system message before each prompt; implies --chat.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens to generate for each prompt at most.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(super) max_new_tokens: usize,
    #[command(flatten)]
    serving: Serving,
    #[command(flatten)]
    pub(super) traffic: Traffic,
    #[command(flatten)]
    sampling: Sampling,
    /// Print the session's metrics as JSON at the end.
    #[arg(long)]
    stats: bool,
}

/// How requests are batched and KV is kept.
#[derive(Debug, ClapArgs)]
struct Serving {
    /// Attention backend: a name, names "a+b" of which each layer takes the first that can run it, a pair
    /// "prefill,decode" of these, or "auto". Tensors are in main memory: "cuda" copies them to the GPU and back.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    attention_backend: String,
    /// Tokens in a page.
    #[arg(long, value_name = "N", default_value_t = 16)]
    page_size: u32,
    /// Pages of the pool; default: enough for all prompts at once.
    #[arg(long, value_name = "N")]
    num_pages: Option<u32>,
    /// Prompt tokens of one request in one step; default: whole prompts.
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    prefill_chunk: usize,
    /// Requests that run at once.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_running: usize,
    /// Tokens of a step.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    max_step_tokens: usize,
    /// How KV is stored: f32, f16, bf16 or fp8_e4m3.
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    kv_dtype: KvDtype,
    /// Scale of stored keys, for fp8_e4m3: stored value × scale = real value.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    k_scale: f32,
    /// Scale of stored values, for fp8_e4m3.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    v_scale: f32,
    /// Compute every token of every prompt, whatever was computed before.
    #[arg(long)]
    no_prefix_cache: bool,
    /// Compare every N-th step with the float64 oracle: "every=N". Exit 1 where attention is wrong.
    #[arg(long, value_name = "every=N", value_parser = parse_every, default_value = "every=0", hide_default_value = true)]
    verify: u64,
    /// Threads of the attention backend; default: all.
    #[arg(long, value_name = "N", value_parser = super::bench::threads)]
    threads: Option<usize>,
}

/// How tokens are chosen.
#[derive(Debug, ClapArgs)]
struct Sampling {
    /// 0 always takes the most probable token.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    temperature: f32,
    /// Only the N most probable tokens.
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Only the fewest tokens with this much probability together.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    top_p: f32,
    /// Seed; each prompt's generator starts at the seed plus its place.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    let cases = args.cases.as_deref().map(cases::read).transpose()?;
    if cases.is_none() && args.prompt.is_empty() {
        bail!(Failure::usage("nothing to do: give --prompt TEXT or --cases FILE"));
    }
    if let Some(kind) = args.random_model {
        return random::run(args, kind);
    }
    let path = args.model.as_deref().ok_or_else(|| Failure::usage("give --model FILE or --random-model KIND"))?;
    let mut model = load(path)?;
    let prompts = match &cases {
        Some(cases) => cases.check_prompts(&model)?,
        None => args.prompt.iter().map(|text| encode(&model, text, args)).collect::<Result<_>>()?,
    };
    let requests = requests(args, &model, cases.as_ref(), &prompts);
    let config = session_config(args, &requests, model.decoder.max_len())?;
    let mut session = Session::new(&model.decoder, &config).map_err(Failure::input)?;
    let begin = Instant::now();
    let answers = generate(args, &mut session, &mut model, &requests, cases.is_none())?;
    report(args, &session, &answers, begin.elapsed())?;
    let verified = session.verify_report().map_or(Outcome::Success, |report| verify_outcome(&report));
    let compared = match cases {
        Some(cases) => cases.compare(&model, &answers, args.min_margin)?,
        None => Outcome::Success,
    };
    let alike = match &args.logits_like {
        Some(other) => logits::compare(&mut model.decoder, &config, other, &requests, args.max_logit_error)?,
        None => Outcome::Success,
    };
    let outcomes = [verified, compared, alike];
    Ok(outcomes.into_iter().find(|outcome| *outcome != Outcome::Success).unwrap_or(Outcome::Success))
}

/// `every=N` as N.
fn parse_every(text: &str) -> Result<u64, String> {
    let number = text.strip_prefix("every=").and_then(|number| number.parse().ok());
    number.ok_or_else(|| format!("{text:?} is not of the form every=N"))
}

/// Says what verification saw; the errors of a sound f32 backend are far below the bound.
pub(super) fn verify_outcome(report: &VerifyReport) -> Outcome {
    const MAX_REL: f64 = 1e-4;
    let Some((layer, worst)) = report.worst() else { return Outcome::Success };
    let is_sound = report.num_anomalies() == 0 && worst.max_rel <= MAX_REL;
    output::note(&format!(
        "verified {} of {} steps against float64: worst layer {layer}, relative error {:.1e} (bound {MAX_REL:.0e}), \
         {} anomalies: {}",
        report.num_sampled,
        report.num_steps,
        worst.max_rel,
        report.num_anomalies(),
        if is_sound { "ok" } else { "WRONG" },
    ));
    if is_sound { Outcome::Success } else { Outcome::CheckFailed }
}

fn load(path: &Path) -> Result<Model> {
    let bar = ProgressBar::no_length().with_message("loading");
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} tensors").expect("a constant template"));
    let model = Model::open(path, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    model.map_err(Failure::input).with_context(|| path.display().to_string())
}

fn encode(model: &Model, text: &str, args: &Args) -> Result<Vec<u32>> {
    if args.chat || args.system.is_some() {
        return chat_tokens(model, args.system.as_deref(), text);
    }
    Ok(model.tokenizer.encode(text, SpecialTokens::AsText).map_err(Failure::input)?)
}

/// A user's message (after a system message, where given) in the model's chat template.
pub fn chat_tokens(model: &Model, system: Option<&str>, text: &str) -> Result<Vec<u32>> {
    let Some(template) = &model.chat_template else {
        bail!(Failure::usage("the model has no chat template: leave out --chat and --system"));
    };
    let mut messages: Vec<Message> = system.map(|text| Message::new("system", text)).into_iter().collect();
    messages.push(Message::user(text));
    let text = template.render(&messages, true).map_err(Failure::input)?;
    Ok(model.tokenizer.encode(&text, SpecialTokens::Parse).map_err(Failure::input)?)
}

fn requests(args: &Args, model: &Model, cases: Option<&Cases>, prompts: &[Vec<u32>]) -> Vec<RequestSpec> {
    let num_new = |place| cases.map_or(args.max_new_tokens, |cases| cases.num_expected(place));
    specs(args, model.tokenizer.ends(), prompts, num_new)
}

/// A request for each prompt.
pub(super) fn specs(
    args: &Args,
    ends: &[u32],
    prompts: &[Vec<u32>],
    num_new: impl Fn(usize) -> usize,
) -> Vec<RequestSpec> {
    let Sampling { temperature, top_k, top_p, seed } = args.sampling;
    (0u64..)
        .zip(prompts)
        .enumerate()
        .map(|(place, (number, prompt))| RequestSpec {
            prompt: prompt.clone(),
            max_new_tokens: num_new(place),
            stop_tokens: ends.to_vec(),
            sampling: SamplingParams { temperature, top_k, top_p, seed: seed.wrapping_add(number) },
            extra: ExtraKey::default(),
        })
        .collect()
}

/// How the session is made; requests longer than `max_len` positions are refused before a pool is sized for them.
pub(super) fn session_config(args: &Args, requests: &[RequestSpec], max_len: usize) -> Result<SessionConfig> {
    let serving = &args.serving;
    check_lens(requests, max_len)?;
    let page_size = PageSize::new(serving.page_size).map_err(Failure::input)?;
    let num_pages = match serving.num_pages {
        Some(num_pages) => num_pages,
        None => pages_for_all(requests, page_size, args.traffic.num_requests(1))?,
    };
    let kv_format = match serving.kv_dtype {
        KvDtype::F32 => KvFormat::F32,
        KvDtype::Fp8Latent => KvFormat::Fp8Latent,
        KvDtype::F16 => KvFormat::F16,
        KvDtype::Bf16 => KvFormat::Bf16,
        KvDtype::Fp8E4m3 => KvFormat::Fp8E4m3(KvScales::new(serving.k_scale, serving.v_scale).map_err(Failure::input)?),
    };
    Ok(SessionConfig {
        page_size,
        num_pages,
        kv_format,
        scheduler: SchedulerConfig {
            max_running: serving.max_running,
            max_step_tokens: serving.max_step_tokens,
            extend_chunk: serving.prefill_chunk,
        },
        backend: serving.attention_backend.clone(),
        device: HostDevice { num_threads: serving.threads, ..HostDevice::default() },
        prefix_cache: (!serving.no_prefix_cache).then(PrefixConfig::default),
        verify_every: serving.verify,
    })
}

/// Pages that hold all requests at once, each sent `repeat` times.
fn pages_for_all(requests: &[RequestSpec], page_size: PageSize, repeat: usize) -> Result<u32> {
    let pages = requests.iter().map(|request| page_size.pages_for(len_at_end(request)));
    let needed = pages.fold(0, usize::saturating_add).saturating_mul(repeat);
    Ok(u32::try_from(needed).map_err(|_| {
        let max = u32::MAX;
        Failure::usage(format!("all requests at once need {needed} pages, a pool has {max} at most: give --num-pages"))
    })?)
}

/// Tokens of a request at its end.
fn len_at_end(request: &RequestSpec) -> usize {
    request.prompt.len().saturating_add(request.max_new_tokens)
}

/// Refuses the first request that the model's positions do not hold.
fn check_lens(requests: &[RequestSpec], max_len: usize) -> Result<()> {
    let Some(place) = requests.iter().position(|request| len_at_end(request) > max_len) else { return Ok(()) };
    let RequestSpec { prompt, max_new_tokens, .. } = &requests[place];
    let error = SubmitError::TooLong { prompt_len: prompt.len(), max_new_tokens: *max_new_tokens, max_len };
    Err(Failure::input(error)).with_context(|| format!("prompt {place}"))
}

/// Sends the requests and runs the session to its end; prints text as it comes where `show` says so.
fn generate(
    args: &Args,
    session: &mut Session,
    model: &mut Model,
    requests: &[RequestSpec],
    show: bool,
) -> Result<Vec<Answer>> {
    let Model { decoder, tokenizer, .. } = model;
    let mut streams = show.then(|| TextStreams::new(tokenizer, args.traffic.num_requests(requests.len())));
    args.traffic.run(session, decoder, requests, &mut |event| {
        if let Some(streams) = &mut streams {
            streams.take(event);
        }
    })
}

pub(super) fn report(args: &Args, session: &Session, answers: &[Answer], elapsed: Duration) -> Result<()> {
    let stats: &Stats = session.stats();
    let seconds = elapsed.as_secs_f64();
    let tokens: usize = answers.iter().map(|a| a.completion.tokens.len()).sum();
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = tokens as f64 / seconds;
    output::note(&format!(
        "{} requests, {} prompt tokens computed, {tokens} new tokens in {seconds:.2} s: {rate:.1} tokens/s on backend {} \
         (page size {}, {} steps, attention {:.0} % of the time)",
        answers.len(),
        stats.prefill_tokens,
        chosen(session.selection()),
        args.serving.page_size,
        stats.num_steps,
        100.0 * stats.attention_time.as_secs_f64() / seconds,
    ));
    if args.stats {
        output::write(&format!("{}\n", serde_json::json!(session.metrics())))?;
    }
    Ok(())
}
