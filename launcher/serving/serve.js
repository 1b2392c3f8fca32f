"use strict";
// One page for text, pictures and sound: it asks GET /model which, and draws the bytes of POST /sample as they come.

const $ = (id) => document.getElementById(id);
let model = null; // what GET /model says
let prompt = new Uint8Array(); // of the sample that is shown
let view = null; // draws it
let stopper = null; // aborts the request under way

// ---- How bytes are shown: begin(prompt), add(bytes), end() ----

class TextView {
  begin(prompt) {
    // Keeps half a character until the rest comes; what is no UTF-8 becomes U+FFFD.
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    $("text").hidden = false;
    $("scored").hidden = true;
    $("given").textContent = this.decoder.decode(prompt, { stream: true });
    $("sampled").textContent = "";
  }
  add(bytes) { $("sampled").append(this.decoder.decode(bytes, { stream: true })); }
  end() { $("sampled").append(this.decoder.decode()); }
}

class PictureView {
  begin(prompt) {
    const { width, height, channels } = pictureSize();
    const canvas = $("canvas");
    Object.assign(canvas, { width, height, hidden: false });
    canvas.style.width = `${width * Math.max(1, Math.round(384 / width))}px`;
    this.context = canvas.getContext("2d");
    this.image = this.context.createImageData(width, height);
    this.channels = channels;
    this.known = 0;
    this.add(prompt);
  }
  add(bytes) {
    for (const byte of bytes) {
      const pixel = 4 * Math.floor(this.known / this.channels);
      const channel = this.known % this.channels;
      if (this.channels >= 3) {
        if (channel < 3) this.image.data[pixel + channel] = byte;
      } else if (channel === 0) {
        this.image.data.fill(byte, pixel, pixel + 3); // grey
      }
      this.image.data[pixel + 3] = 255;
      this.known += 1;
    }
    this.context.putImageData(this.image, 0, 0);
  }
  end() {}
}

class SoundView {
  begin(prompt) {
    this.parts = [prompt];
    $("audio").hidden = true;
  }
  add(bytes) { this.parts.push(bytes); }
  end() {
    const sound = wav(joined(this.parts), Number($("rate").value) || 16000);
    URL.revokeObjectURL($("audio").src);
    $("audio").src = URL.createObjectURL(new Blob([sound], { type: "audio/wav" }));
    $("audio").hidden = false;
  }
}

// Positions that are no picture's leave it to the data.
function pictureSize() { return { ...model.data?.properties, ...model.embedding }; }

// ---- Bytes ----

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) { whole.set(part, place); place += part.length; }
  return whole;
}

function fromBase64(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }

function toBase64(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

// 8-bit mu-law (ITU-T G.711) as a WAV file of 16-bit samples, which every browser plays.
function wav(bytes, rate) {
  const file = new DataView(new ArrayBuffer(44 + 2 * bytes.length));
  const put = (place, text) => [...text].forEach((c, i) => file.setUint8(place + i, c.charCodeAt(0)));
  put(0, "RIFF"); file.setUint32(4, 36 + 2 * bytes.length, true); put(8, "WAVEfmt ");
  file.setUint32(16, 16, true); file.setUint16(20, 1, true); file.setUint16(22, 1, true);
  file.setUint32(24, rate, true); file.setUint32(28, 2 * rate, true);
  file.setUint16(32, 2, true); file.setUint16(34, 16, true);
  put(36, "data"); file.setUint32(40, 2 * bytes.length, true);
  bytes.forEach((byte, i) => {
    const code = ~byte & 0xff;
    const size = (((code & 15) << 3) + 132 << (code >> 4 & 7)) - 132;
    file.setInt16(44 + 2 * i, code & 128 ? -size : size, true);
  });
  return file.buffer;
}

// ---- The prompt ----

async function readPrompt() {
  if (model.modality === "text") return new TextEncoder().encode($("prompt").value);
  if (model.modality === "image") return $("picture").files.length ? readPicture($("picture").files[0]) : new Uint8Array();
  return $("file").files.length ? new Uint8Array(await $("file").files[0].arrayBuffer()) : new Uint8Array();
}

// The upper rows of a picture, scaled to the model's size.
async function readPicture(file) {
  const { width, height, channels } = pictureSize();
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.drawImage(await createImageBitmap(file), 0, 0, width, height);
  const rgba = context.getImageData(0, 0, width, height).data;
  const pixels = Math.min(height, Math.max(0, Number($("rows").value))) * width;
  const bytes = new Uint8Array(pixels * channels);
  for (let pixel = 0; pixel < pixels; pixel++) {
    const [red, green, blue] = rgba.subarray(4 * pixel);
    const grey = Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
    for (let channel = 0; channel < channels; channel++) {
      bytes[pixel * channels + channel] = channels >= 3 ? (channel < 3 ? rgba[4 * pixel + channel] : 255) : channel ? 255 : grey;
    }
  }
  return bytes;
}

// ---- A sample ----

function tell(error) {
  $("error").textContent = error;
  $("error").hidden = !error;
}

async function sample(event) {
  event.preventDefault();
  tell("");
  stopper = new AbortController();
  busy(true);
  $("status").textContent = "waiting …";
  try {
    prompt = await readPrompt();
    const asked = { prompt_base64: toBase64(prompt) };
    for (const name of ["bytes", "temperature", "top_k", "top_p", "seed"]) {
      if ($(name).value !== "") asked[name] = Number($(name).value);
    }
    const response = await fetch("/sample", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked),
      signal: stopper.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error);
    view.begin(prompt);
    await follow(response.body.getReader());
  } catch (error) {
    if (error.name === "AbortError") {
      $("status").textContent += " – stopped";
    } else {
      $("status").textContent = "";
      tell(error.message);
    }
  }
  busy(false);
}

// The lines of an answer, each a JSON object; a piece may end within one.
async function follow(reader) {
  const decoder = new TextDecoder();
  const begun = performance.now();
  let rest = "", seed = null, known = 0, ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => JSON.parse(text))) {
        if ("seed" in line) seed = line.seed;
        if ("error" in line) throw new Error(line.error);
        if ("base64" in line) {
          const bytes = fromBase64(line.base64);
          known += bytes.length;
          view.add(bytes);
        }
        ended = ended || "done" in line;
      }
      const seconds = (performance.now() - begun) / 1000;
      $("status").textContent = `${known} bytes, ${Math.round(known / Math.max(seconds, 0.001))} a second, seed ${seed}`;
    }
  } finally {
    view.end();
  }
  if (!ended) throw new Error("the server broke off");
}

// ---- The likelihood of a text ----

const MOST_BITS = 8; // of a character, beyond which colours are the same
let chosen = null; // the character that is read out

async function score() {
  tell("");
  stopper = new AbortController();
  busy(true);
  $("status").textContent = "waiting …";
  try {
    const text = $("prompt").value;
    const response = await fetch("/likelihood", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text_base64: toBase64(new TextEncoder().encode(text)) }),
      signal: stopper.signal,
    });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    showScores(text, found);
    $("status").textContent = "";
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") tell(error.message);
  }
  busy(false);
}

// A span a character, with the bits of all of its bytes.
function showScores(text, found) {
  const encoder = new TextEncoder();
  const spans = document.createDocumentFragment();
  let place = 0;
  for (const character of text) {
    const size = encoder.encode(character).length;
    const nats = found.nats.slice(place, place + size);
    const bits = nats.reduce((sum, each) => sum + each, 0) / Math.LN2;
    const span = document.createElement("span");
    span.textContent = character;
    if (character === "\n") span.className = "line-end";
    span.style.setProperty("--share", Math.min(1, bits / MOST_BITS).toFixed(3));
    const shown = { "\n": "line end", "\t": "tab", " ": "space" }[character] ?? character;
    const each = size > 1 ? ` (${nats.map((nat) => (nat / Math.LN2).toFixed(2)).join(" + ")})` : "";
    span.dataset.reading = `${size > 1 ? `bytes ${place + 1} to ${place + size}` : `byte ${place + 1}`}: ${shown}, ${bits.toFixed(2)} bits${each}`;
    spans.append(span);
    place += size;
  }
  chosen = null;
  $("reading").textContent = "Point at a character, or choose one by the arrow keys, to read its bits.";
  $("characters").replaceChildren(spans);
  $("total").textContent = `${found.bits_per_byte.toFixed(3)} bits per byte over ${found.bytes.toLocaleString("en")} bytes`;
  $("text").hidden = true;
  $("scored").hidden = false;
}

function choose(span) {
  if (!span?.dataset.reading) return;
  chosen?.classList.remove("chosen");
  chosen = span;
  chosen.classList.add("chosen");
  $("reading").textContent = chosen.dataset.reading;
}

function chooseByKey(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!step) return;
  event.preventDefault();
  choose(chosen ? chosen[step] : $("characters").firstElementChild);
  chosen?.scrollIntoView({ block: "nearest" });
}

// ---- The page ----

function busy(is) {
  $("sample").disabled = $("score").disabled = is;
  $("stop").disabled = !is;
}

async function start() {
  const response = await fetch("/model");
  if (!response.ok) throw new Error((await response.json()).error);
  model = await response.json();
  const kind = model.modality;
  document.title = $("name").textContent = model.name;
  $("about").textContent = `${{ text: "Text", image: "Pictures", audio: "Sound" }[kind]}, ${model.parameters.toLocaleString("en")} parameters, ` +
    `context of ${model.context.toLocaleString("en")} bytes`;
  view = { text: new TextView(), image: new PictureView(), audio: new SoundView() }[kind];
  $("text-prompt").hidden = kind !== "text";
  $("picture-prompt").hidden = kind !== "image";
  $("file-prompt").hidden = $("rate-setting").hidden = kind !== "audio";
  if (kind === "image") $("rows").value = Math.floor(pictureSize().height / 2);
  if (model.data?.properties?.rate) $("rate").value = model.data.properties.rate;
  if (kind === "text") $("bytes").placeholder = "up to 256";
  $("form").addEventListener("submit", sample);
  $("score").hidden = $("about-score").hidden = kind !== "text";
  $("score").addEventListener("click", score);
  $("characters").addEventListener("pointerover", (event) => choose(event.target));
  $("characters").addEventListener("keydown", chooseByKey);
  $("stop").addEventListener("click", () => stopper.abort());
  document.body.dataset.ready = "true";
}

start().catch((error) => tell(error.message));
