"""The page at /, to try a model in a browser: one HTML file without references to others."""

from html import escape

from .served_model import ServedModel

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 860px;
  margin: 0 auto; padding: 12px 16px 40px; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; margin: .4rem 0; }
p { margin: .4rem 0; color: #444; }
textarea { font: inherit; width: 100%; box-sizing: border-box; padding: 8px; border: 1px solid #888;
  border-radius: 4px; resize: vertical; }
fieldset { border: 0; padding: 0; margin: 10px 0; display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: end; }
label { display: block; } fieldset label { flex: 1 1 130px; }
fieldset input, select { font: inherit; width: 100%; box-sizing: border-box; padding: 6px 8px;
  border: 1px solid #888; border-radius: 4px; background: #fff; height: 2.4em; }
button { font: inherit; padding: 8px 20px; border: 1px solid #1558a6; border-radius: 4px; background: #1558a6;
  color: #fff; cursor: pointer; margin-right: 8px; }
button:disabled { background: #fff; color: #767676; border-color: #aaa; cursor: default; }
:focus-visible { outline: 3px solid #7db3ef; outline-offset: 1px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f5f7; border-radius: 4px; padding: 12px;
  min-height: 3em; font: 15px/1.5 ui-monospace, monospace; }
pre:empty { display: none; }
#state { min-height: 1.5em; } .error { color: #a11; }
"""
SCRIPT = """
const form = document.querySelector("form"), output = document.querySelector("pre"),
  state = document.getElementById("state"), start = document.getElementById("start"),
  stop = document.getElementById("stop");
let running = null;
function body() {
  const value = name => form.elements[name].value;
  const asked = {max_tokens: Number(value("max_tokens")), temperature: Number(value("temperature")),
    top_p: Number(value("top_p")), stream: true};
  if (value("seed") !== "") asked.seed = Number(value("seed"));
  if (value("kind") === "chat") asked.messages = [{role: "user", content: value("prompt")}];
  else asked.prompt = value("prompt");
  return asked;
}
function show(line) {
  if (!line.startsWith("data: ") || line === "data: [DONE]") return;
  const answer = JSON.parse(line.slice(6));
  if (answer.error) throw new Error(answer.error.message);
  for (const choice of answer.choices)
    output.append(choice.delta ? choice.delta.content || "" : choice.text);
}
async function generate() {
  const path = form.elements.kind.value === "chat" ? "/v1/chat/completions" : "/v1/completions";
  const answer = await fetch(path, {method: "POST", body: JSON.stringify(body()), signal: running.signal});
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\\n");
    rest = lines.pop();
    lines.forEach(show);
  }
}
form.addEventListener("submit", async event => {
  event.preventDefault();
  running = new AbortController();
  output.textContent = form.elements.kind.value === "chat" ? "" : form.elements.prompt.value;
  state.className = "";
  state.textContent = "Generating";
  start.disabled = true; stop.disabled = false;
  const begin = performance.now();
  try {
    await generate();
    state.textContent = `Done in ${((performance.now() - begin) / 1000).toFixed(1)} s`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    state.className = stopped ? "" : "error";
    state.textContent = stopped ? "Stopped" : error.message;
  }
  start.disabled = false; stop.disabled = true;
});
stop.addEventListener("click", () => running.abort());
"""
CHAT = '<option value="chat">chat</option>'
NUMBERS = (
    ("max_tokens", "New tokens", 'value="64" min="1" step="1" required'),
    ("temperature", "Temperature", 'value="1" min="0" step="any" required'),
    ("top_p", "Top p", 'value="1" min="0.01" max="1" step="any" required'),
    ("seed", "Seed (optional)", 'step="1"'),
)


def page(model: ServedModel) -> bytes:
    """Return the page for a model, UTF-8. It offers chat where there is a template."""
    name = escape(model.name)
    inputs = "".join(
        f'<label>{label}<input name="{key}" type="number" {limits}></label>'
        for key, label, limits in NUMBERS
    )
    kinds = (
        f'<option value="text">continuation</option>{CHAT if model.template else ""}'
    )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><link rel="icon" href="data:,"><style>{CSS}</style></head><body>
<h1>{name}</h1>
<p>Up to {model.max_length:,} tokens in a text; temperature 0 is greedy. Programs use the API:
<code>/v1/completions</code>, <code>/v1/chat/completions</code>, <code>/v1/models</code>, <code>/api</code>.</p>
<form><label>Text<textarea name="prompt" rows="5" required autofocus></textarea></label>
<fieldset><label>Kind<select name="kind">{kinds}</select></label>{inputs}</fieldset>
<button id="start">Generate</button><button id="stop" type="button" disabled>Stop</button></form>
<p id="state" role="status"></p><pre aria-label="Generated text"></pre>
<noscript><p>This page needs JavaScript; the API does not.</p></noscript>
<script>{SCRIPT}</script></body></html>
"""
    return text.encode("utf-8")
