// The playground: one request at a time, its text as it comes.
import { ask } from "./api.js";

const field = (id) => document.getElementById(id);
let stopper = null;

field("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopper === null) generate();
});
field("stop").addEventListener("click", () => stopper?.abort());

// A link may bring a prompt along, and have it continued at once: /?prompt=In+the#generate
const given = new URLSearchParams(location.search);
if (given.has("prompt")) field("prompt").value = given.get("prompt");
if (given.has("max_tokens")) field("max-tokens").value = given.get("max_tokens");
if (location.hash === "#generate") generate();

async function generate() {
  stopper = new AbortController();
  field("send").hidden = true;
  field("stop").hidden = false;
  const output = field("output");
  output.className = output.textContent = field("usage").textContent = "";
  const started = performance.now();
  try {
    const answer = await ask(path(), { method: "POST", body: JSON.stringify(request()), signal: stopper.signal });
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      output.textContent += choice?.text ?? choice?.delta?.content ?? "";
      if (chunk.usage) showUsage(chunk.usage, (performance.now() - started) / 1000);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      output.className = "error";
      output.textContent += error.message;
    }
  } finally {
    stopper = null;
    field("send").hidden = false;
    field("stop").hidden = true;
  }
}

function path() {
  return field("kind").value === "chat" ? "/v1/chat/completions" : "/v1/completions";
}

function request() {
  const prompt = field("prompt").value;
  const body = {
    max_tokens: Number(field("max-tokens").value),
    temperature: Number(field("temperature").value),
    top_p: Number(field("top-p").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  return field("kind").value === "chat" ? { ...body, messages: [{ role: "user", content: prompt }] } : { ...body, prompt };
}

// What a stream of server-sent events holds, up to its [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function showUsage(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  field("usage").textContent =
    `${usage.completion_tokens} tokens in ${seconds.toFixed(2)} s (${(usage.completion_tokens / seconds).toFixed(1)}/s); ` +
    `prompt ${usage.prompt_tokens}, of which ${cached} cached`;
}
