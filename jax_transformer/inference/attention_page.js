
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = {
  cross: {
    title: "Cross", explanation: "Each token of the output looks at the source.",
    rows: "Output", columns: "Source", verb: "looks at",
  },
  encoder: {
    title: "Encoder", explanation: "Each token of the source looks at the source.",
    rows: "Source, looking", columns: "Source, looked at", verb: "looks at",
  },
  decoder: {
    title: "Decoder",
    explanation: "While a token of the output is written, the decoder looks at those before it.",
    rows: "Output, being written", columns: "Output so far", verb: "looks back at",
  },
};
const HINT = "Point at a token or a cell, or move with the arrow keys.";
const PAUSE = 500;  // milliseconds without a key before what was typed is translated
const MEAN = -1;  // in place of a head: the mean over all heads
const shown = { sentence: 0, hypothesis: 0, kind: "cross", layer: 0, head: MEAN, row: 0, column: 0 };
let weights = new Uint8Array();
const get = id => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function radio(name, checked, choose, ...children) {
  const input = make("input", { type: "radio", name, checked });
  input.addEventListener("change", choose);
  return make("label", {}, input, ...children);
}

// The weights of what is shown

const sentence = () => data.sentences[shown.sentence];
const attention = () => sentence()?.hypotheses[shown.hypothesis]?.attention;
const map = () => attention()[shown.kind];
// Most weights are small: the colour grows faster than the weight at first
const share = weight => Math.pow(weight, 0.6);
const visible = piece => piece.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5")
  .replace(/\t/g, "\u21e5").replace(/\u00a0|\u202f/g, "\u237d") || "\u2205";
const shade = (element, weight) => {
  element.style.setProperty("--share", `${100 * share(weight)}%`);
  element.classList.toggle("dark", share(weight) > 0.55);
};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function weight(row, column, layer = shown.layer, head = shown.head) {
  const { heads, rows, columns } = map();
  const index = h => ((layer * heads + h) * rows.length + row) * columns.length + column;
  if (head !== MEAN) return weights[index(head)] / 255;
  let sum = 0;
  for (let h = 0; h < heads; h++) sum += weights[index(h)];
  return sum / heads / 255;
}

// Lines and alternatives

function drawLines() {
  const score = hypothesis => hypothesis.score === null ? "" : hypothesis.score.toFixed(3);
  get("lines").lastElementChild.replaceChildren(...data.sentences.map((each, index) => radio(
    "line", index === shown.sentence, () => chooseSentence(index),
    make("b", { textContent: each.number }),
    make("span", { className: "output", dir: "auto", textContent: each.hypotheses[0].text }),
    make("span", { className: "quiet", dir: "auto", textContent: each.source }),
  )));
  const hypotheses = sentence().hypotheses;
  get("alternatives").hidden = hypotheses.length < 2 && !score(hypotheses[0]);
  get("alternatives").lastElementChild.replaceChildren(...hypotheses.map((each, index) => radio(
    "hypothesis", index === shown.hypothesis,
    () => { Object.assign(shown, { hypothesis: index, row: 0, column: 0 }); drawAttention(); },
    make("b", { textContent: index + 1 }),
    make("span", { className: "output", dir: "auto", textContent: each.text }),
    make("b", { textContent: score(each), title: "Score of the beam search" }),
  )));
}

function chooseSentence(index) {
  Object.assign(shown, { sentence: index, hypothesis: 0, row: 0, column: 0 });
  drawLines();
  document.querySelector("#lines :checked").focus();
  showAttention();
}

// Layers and heads

function thumbnail(layer, head) {
  const { rows, columns } = map();
  const canvas = make("canvas", { width: columns.length, height: rows.length });
  const context = canvas.getContext("2d");
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  const rgb = [1, 3, 5].map(i => parseInt(ink.slice(i, i + 2), 16));
  const image = context.createImageData(columns.length, rows.length);
  rows.forEach((_, row) => columns.forEach((_, column) => {
    const pixel = [...rgb, 255 * share(weight(row, column, layer, head))];
    image.data.set(pixel, 4 * (row * columns.length + column));
  }));
  context.putImageData(image, 0, 0);
  return canvas;
}

function drawHeads() {
  const { layers, heads } = map();
  const all = [MEAN, ...Array(heads).keys()];
  const name = head => head === MEAN ? "mean" : String(head + 1);
  const titles = all.map(head => make("th", { scope: "col", textContent: name(head) }));
  const body = make("tbody");
  for (let layer = 0; layer < layers; layer++) {
    const cells = all.map(head => {
      const checked = layer === shown.layer && head === shown.head;
      const choose = () => { Object.assign(shown, { layer, head }); drawMap(); };
      const label = radio("head", checked, choose, thumbnail(layer, head));
      label.firstChild.setAttribute("aria-label", place(layer, head));
      return make("td", {}, label);
    });
    body.append(make("tr", {}, make("th", { scope: "row", textContent: `layer ${layer + 1}` }), ...cells));
  }
  const head = make("thead", {}, make("tr", {}, make("th"), ...titles));
  get("heads").lastElementChild.replaceChildren(make("table", {}, head, body));
}

const place = (layer, head) =>
  `layer ${layer + 1}, ${head === MEAN ? "mean of the heads" : `head ${head + 1}`}`;

// Tokens and their map

function drawTokens(id, pieces, choose) {
  const buttons = pieces.map((piece, index) => {
    const button = make("button", { type: "button", textContent: visible(piece), tabIndex: -1 });
    button.addEventListener("pointerenter", () => choose(index));
    button.addEventListener("focus", () => choose(index));
    return button;
  });
  if (buttons.length) buttons[0].tabIndex = 0;
  get(id).replaceChildren(...buttons);
}

function moveInTokens(event) {
  const buttons = [...event.currentTarget.children];
  const current = buttons.indexOf(event.target);
  const target = {
    ArrowLeft: current - 1, ArrowRight: current + 1, ArrowUp: current - 1, ArrowDown: current + 1,
    Home: 0, End: buttons.length - 1,
  }[event.key];
  if (current < 0 || target === undefined) return;
  event.preventDefault();
  if (!buttons[target]) return;
  buttons[current].tabIndex = -1;
  buttons[target].tabIndex = 0;
  buttons[target].focus();
}

function drawMap() {
  const { rows, columns } = map();
  const kind = KINDS[shown.kind];
  get("rows-label").textContent = kind.rows;
  get("columns-label").textContent = kind.columns;
  drawTokens("rows", rows, row => point(row, null));
  drawTokens("columns", columns, column => point(null, column));
  const heading = (piece, scope) =>
    make("th", { scope, title: visible(piece), textContent: visible(piece) });
  const titles = columns.map(piece => heading(piece, "col"));
  const table = make("table", { tabIndex: 0 });
  const label = `${kind.title} attention, ${place(shown.layer, shown.head)}: rows look at columns`;
  table.setAttribute("aria-label", label);
  table.style.setProperty("--columns", columns.length);
  table.append(make("thead", {}, make("tr", {}, make("td"), ...titles)));
  table.append(make("tbody", {}, ...rows.map((piece, row) => {
    const cells = columns.map((_, column) => {
      const cell = make("td");
      cell.style.setProperty("--share", `${100 * share(weight(row, column))}%`);
      return cell;
    });
    return make("tr", {}, heading(piece, "row"), ...cells);
  })));
  table.addEventListener("pointerover", event => {
    const cell = event.target.closest("tbody td");
    if (cell) point(cell.parentElement.rowIndex - 1, cell.cellIndex - 1);
  });
  table.addEventListener("focus", () => point(shown.row, shown.column));
  table.addEventListener("keydown", moveInMap);
  get("map").replaceChildren(table);
  get("readout").textContent = HINT;
}

function moveInMap(event) {
  const { rows, columns } = map();
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!moves[event.key]) return;
  event.preventDefault();
  const [down, right] = moves[event.key];
  const within = (index, length) => Math.min(Math.max(index, 0), length - 1);
  point(within(shown.row + down, rows.length), within(shown.column + right, columns.length));
  const cell = event.currentTarget.rows[shown.row + 1].cells[shown.column + 1];
  cell.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// Highlight a row, a column, or the cell of both: null is "all of them"
function point(row, column) {
  const { rows, columns } = map();
  shown.row = row ?? shown.row;
  shown.column = column ?? shown.column;
  [...get("rows").children].forEach((token, index) => {
    token.classList.toggle("here", index === row);
    shade(token, row === null ? weight(index, column) : 0);
  });
  [...get("columns").children].forEach((token, index) => {
    token.classList.toggle("here", index === column);
    shade(token, row === null ? 0 : weight(row, index));
  });
  const table = get("map").firstElementChild;
  table.querySelectorAll(".here").forEach(element => element.classList.remove("here"));
  const marked = [];
  if (row !== null) marked.push(table.rows[row + 1].cells[0]);
  if (column !== null) marked.push(table.rows[0].cells[column + 1]);
  if (row !== null && column !== null) marked.push(table.rows[row + 1].cells[column + 1]);
  marked.forEach(element => element.classList.add("here"));
  const word = piece => make("b", { textContent: visible(piece) });
  const figure = (r, c) => make("b", { textContent: weight(r, c).toFixed(2) });
  const { verb } = KINDS[shown.kind];
  let text;
  if (row !== null && column !== null) {
    text = [word(rows[row]), ` ${verb} `, word(columns[column]), " with weight ", figure(row, column)];
  } else if (row !== null) {
    const most = largest(columns.map((_, index) => weight(row, index)));
    text = [word(rows[row]), ` ${verb} `,
      ...most.flatMap((c, i) => [i ? ", " : "", word(columns[c]), " ", figure(row, c)])];
  } else {
    const most = largest(rows.map((_, index) => weight(index, column)));
    text = [word(columns[column]), " is looked at by ",
      ...most.flatMap((r, i) => [i ? ", " : "", word(rows[r]), " ", figure(r, column)])];
  }
  get("readout").replaceChildren(...text, ` (${place(shown.layer, shown.head)})`);
}

const largest = values =>
  [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, 3);

async function drawAttention() {
  get("attention").hidden = !attention();
  if (!attention()) return;
  const current = map();
  const unpacked = await unpack(current.weights);
  if (!attention() || current !== map()) return;  // something else was chosen meanwhile
  weights = unpacked;
  shown.layer = Math.min(shown.layer, current.layers - 1);
  shown.head = Math.min(shown.head, current.heads - 1);
  get("explanation").textContent = KINDS[shown.kind].explanation;
  drawHeads();
  drawMap();
}

// The service

// The last request for each: a line that is chosen does not stop the translation of what was typed
const running = { text: new AbortController(), maps: new AbortController() };

function stop(...kinds) {
  for (const kind of kinds) running[kind].abort();
}

async function post(fields, signal) {
  const response = await fetch("translate", {
    method: "POST", signal, headers: { "Content-Type": "application/json" },
    body: JSON.stringify(fields),
  });
  const body = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw new Error(body.error);
  return body.translations;
}

function options() {
  const number = id => get(id).value === "" ? null : get(id).valueAsNumber;
  const beam = number("beam");
  return {
    num_beams: beam, num_return_sequences: beam, max_new_tokens: number("longest"),
    length_penalty: number("penalty"),
  };
}

function report(text, bad = false) {
  get("status").textContent = text;
  get("status").classList.toggle("bad", bad);
}

async function ask(kind, fields, use) {
  stop(kind);
  const { signal } = running[kind] = new AbortController();
  try {
    const translations = await post(fields, signal);
    if (!signal.aborted) use(translations);
  } catch (error) {
    if (!signal.aborted) report(error.message, true);
  }
}

const seconds = begin => ((performance.now() - begin) / 1000).toFixed(2);

async function translate() {
  const numbered = get("input").value.split("\n").map((source, index) => ({ source, number: index + 1 }));
  const lines = numbered.filter(({ source }) => source.trim());
  if (!lines.length) {
    stop("text", "maps");
    get("result").hidden = true;
    return report("");
  }
  if (!get("request").reportValidity()) return;
  report("Translating …");
  const fields = options();
  const begin = performance.now();
  await ask("text", { ...fields, text: lines.map(({ source }) => source) }, translations => {
    data.sentences = lines.map((line, index) => ({ ...line, fields, ...translations[index] }));
    Object.assign(shown, { sentence: 0, hypothesis: 0, row: 0, column: 0 });
    report(`${lines.length === 1 ? "One line" : `${lines.length} lines`} in ${seconds(begin)} s`);
    get("result").hidden = false;
    drawLines();
    showAttention();
  });
}

// A page of the service asks for the maps of one line, when that line is shown
async function showAttention() {
  const chosen = sentence();
  if (data.service && !attention()) {
    const fields = { ...chosen.fields, text: chosen.source, attention: true };
    await ask("maps", fields, ([translation]) => { chosen.hypotheses = translation.hypotheses; });
  }
  if (chosen === sentence()) drawAttention();
}

function startService({ beam, max_beam }) {
  document.title = get("heading").textContent = "Translate";
  get("request").hidden = false;
  get("input").focus();
  Object.assign(get("beam"), { value: beam, max: max_beam });
  let timer;
  const soon = () => { clearTimeout(timer); timer = setTimeout(translate, PAUSE); };
  const now = () => { clearTimeout(timer); translate(); };
  get("request").addEventListener("input", soon);
  get("request").addEventListener("submit", event => { event.preventDefault(); now(); });
  get("input").addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) now();
  });
}

function start() {
  document.title = `Attention: ${data.title}`;
  get("title").textContent = data.title;
  get("note").textContent = data.note;
  for (const [kind, { title }] of Object.entries(KINDS)) {
    const choose = () => { Object.assign(shown, { kind, row: 0, column: 0 }); drawAttention(); };
    get("kinds").lastElementChild.append(radio("kind", kind === shown.kind, choose, title));
  }
  for (const value of [0, 0.05, 0.1, 0.25, 0.5, 1]) {
    const step = make("span", { textContent: value });
    step.style.setProperty("--share", `${100 * share(value)}%`);
    get("scale").append(step);
  }
  for (const id of ["rows", "columns"]) get(id).addEventListener("keydown", moveInTokens);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => attention() && drawHeads());
  if (data.service) return startService(data.service);
  if (!data.sentences.length) return get("note").textContent = "There was no line to translate.";
  get("result").hidden = false;
  drawLines();
  drawAttention();
}
start();
