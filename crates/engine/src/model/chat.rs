//! Chat templates: from a conversation to the text that the model was trained on.
//!
//! The template is the model's own (Jinja, from `tokenizer.chat_template`); this module runs it and
//! adds nothing: a default system message, where there is one, is the template's. The rendered text
//! holds control tokens, so encode it with [`super::SpecialTokens::Parse`].

use minijinja::{Environment, ErrorKind, Value, context};
use serde::Serialize;

use super::Tokenizer;
use super::gguf::{GgufError, Metadata};

const NAME: &str = "chat";

/// Instructions that a template may run: far more than a long conversation needs, and an end to loops that have none.
/// A template comes with a model file, from a stranger.
const MAX_INSTRUCTIONS: u64 = 50_000_000;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `"system"`, `"user"` or `"assistant"`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }
}

/// Why a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The metadata value is not a text.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The template is not valid Jinja.
    #[error("the model's chat template cannot be parsed")]
    Parse {
        /// The template engine's reason.
        source: minijinja::Error,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// The template's words.
        message: String,
    },
    /// The template failed on this conversation.
    #[error("the model's chat template failed")]
    Render {
        /// The template engine's reason.
        source: minijinja::Error,
    },
}

/// A model's chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template of a file, or `None` when it has none (a base model).
    ///
    /// # Errors
    /// When there is one and it is not valid Jinja.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Self>, ChatError> {
        let Some(source) = metadata.opt_string("tokenizer.chat_template")? else {
            return Ok(None);
        };
        let text = |token: Option<u32>| token.and_then(|id| tokenizer.token_text(id)).unwrap_or_default().to_owned();
        Self::new(source, text(tokenizer.bos()), text(tokenizer.eos())).map(Some)
    }

    /// A template from its source; `bos` and `eos` are what `bos_token` and `eos_token` print.
    ///
    /// # Errors
    /// When it is not valid Jinja.
    pub fn new(source: &str, bos: String, eos: String) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        // Templates are written for Python's Jinja with these two on, and use its string methods.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(python_method);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.add_function("raise_exception", raise);
        environment.add_template_owned(NAME, source.to_owned()).map_err(|source| ChatError::Parse { source })?;
        Ok(Self { environment, bos, eos })
    }

    /// The text of a conversation. With `add_generation_prompt` it ends where the assistant's
    /// answer begins.
    ///
    /// # Errors
    /// When the template refuses the conversation or fails on it.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let failed = |source| ChatError::Render { source };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let values = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
        };
        template.render(values).map_err(|error| refusal(&error).unwrap_or(ChatError::Render { source: error }))
    }
}

/// Marks errors that a template raised itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise(message: String) -> Result<Value, minijinja::Error> {
    let error = minijinja::Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Raised(message)))
}

fn refusal(error: &minijinja::Error) -> Option<ChatError> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(ChatError::Refused { message: message.clone() });
        }
        cause = error.source();
    }
    None
}

/// The string methods of Python that chat templates call.
fn python_method(
    _state: &minijinja::State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, minijinja::Error> {
    let unknown = || minijinja::Error::new(ErrorKind::UnknownMethod, format!("no method {method:?}"));
    let text = value.as_str().ok_or_else(unknown)?;
    let argument = arguments.first().and_then(Value::as_str);
    Ok(match (method, argument) {
        ("strip", None) => text.trim().into(),
        ("lstrip", None) => text.trim_start().into(),
        ("rstrip", None) => text.trim_end().into(),
        ("strip", Some(set)) => text.trim_matches(|c| set.contains(c)).into(),
        ("lstrip", Some(set)) => text.trim_start_matches(|c| set.contains(c)).into(),
        ("rstrip", Some(set)) => text.trim_end_matches(|c| set.contains(c)).into(),
        ("upper", None) => text.to_uppercase().into(),
        ("lower", None) => text.to_lowercase().into(),
        ("startswith", Some(prefix)) => text.starts_with(prefix).into(),
        ("endswith", Some(suffix)) => text.ends_with(suffix).into(),
        ("split", None) => text.split_whitespace().map(Value::from).collect::<Vec<_>>().into(),
        ("split", Some(separator)) if !separator.is_empty() => {
            text.split(separator).map(Value::from).collect::<Vec<_>>().into()
        }
        _ => return Err(unknown()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<s>system\nBe kind</s>\n' }}{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>\n'}}\
        {% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "<b>".into(), "<e>".into()).unwrap()
    }

    #[test]
    fn the_templates_default_system_message_is_used() {
        let text = template(CHATML).render(&[Message::user("Hi")], true).unwrap();
        assert_eq!(text, "<s>system\nBe kind</s>\n<s>user\nHi</s>\n<s>assistant\n");
        let messages = [Message::new("system", "S"), Message::user("<s>")];
        let text = template(CHATML).render(&messages, false).unwrap();
        assert_eq!(text, "<s>system\nS</s>\n<s>user\n<s></s>\n");
    }

    #[test]
    fn a_template_that_raises_is_a_refusal_with_its_words() {
        let source = "{{ bos_token }}{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}";
        assert_eq!(template(source).render(&[Message::user("a")], true).unwrap(), "<b>");
        let error = template(source).render(&[Message::user("a"), Message::user("b")], true).unwrap_err();
        assert!(matches!(&error, ChatError::Refused { message } if message == "one only"), "{error:?}");
    }

    #[test]
    fn string_methods_of_python_work() {
        let source = "{{ messages[0].content.strip().upper() }}{{ messages[0].content.split('b')[0] }}";
        assert_eq!(template(source).render(&[Message::user(" ab ")], true).unwrap(), "AB a");
    }

    #[test]
    fn broken_and_failing_templates_are_errors() {
        let error = ChatTemplate::new("{% if %}", String::new(), String::new()).unwrap_err();
        assert!(matches!(error, ChatError::Parse { .. }));
        let error = template("{{ messages[0].content.nope() }}").render(&[Message::user("a")], true).unwrap_err();
        assert!(matches!(error, ChatError::Render { .. }));
    }

    #[test]
    fn a_template_that_never_ends_is_an_error_and_loop_controls_work() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        let error = template(endless).render(&[Message::user("a")], true).unwrap_err();
        assert!(matches!(error, ChatError::Render { .. }), "{error}");
        let stops = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}";
        assert_eq!(template(stops).render(&[Message::user("a"), Message::user("b")], true).unwrap(), "a");
    }
}
