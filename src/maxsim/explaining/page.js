"use strict";
// A choice is query tokens, or document tokens of one hit; what is pointed at or has the focus goes before what is kept.
const data = JSON.parse(document.getElementById("data").textContent);
const query = document.getElementById("query");
const own = document.getElementById("own");
const all = document.getElementById("all");
const said = document.getElementById("said");
const numbers = (text) => text.split(" ").map(Number);
const queryCells = cellsOf(query);
const hits = data.hits.map((hit, n) => new Hit(hit, n, document.getElementById(`hit-${n + 1}`)));
let kept = null, pointed = null, drawn = 0;

function cellsOf(box) {
  return [...box.querySelectorAll(".t")].map((element) => ({ element, tokens: numbers(element.dataset.t) }));
}

function Hit(hit, n, section) {
  Object.assign(this, hit, { n, section });
  this.cells = cellsOf(section);
  this.rows = [...section.querySelectorAll("tr[data-q]")];
  this.table = section.querySelector(".table");
  this.text = section.querySelector(".document");
  this.frame = section.querySelector(".frame");
  this.status = section.querySelector(".status");
  this.shades = Uint8Array.from(atob(hit.shades), (c) => c.charCodeAt(0));
  this.width = hit.labels.length;
  this.cursor = 0;
  this.won = hit.labels.map(() => []); // of each document token the query tokens that matched it
  hit.index.forEach((j, i) => { if (j >= 0) this.won[j].push(i); });
  this.boxes = new Map(); // of each patch its first and last row and column
  if (hit.patches) hit.patches.tokens.forEach((j, n) => {
    if (j < 0) return;
    const row = Math.floor(n / hit.patches.columns), column = n % hit.patches.columns;
    const [top, bottom, left, right] = this.boxes.get(j) || [row, row, column, column];
    this.boxes.set(j, [top, row, Math.min(left, column), Math.max(right, column)]);
  });
}

// How strongly to shade each document token, 0 to 1. Of query tokens: the largest similarity. Of none in particular:
// of a text what each brings to the score, of a page image the largest similarity of all query tokens.
Hit.prototype.strengths = function (tokens) {
  const found = new Float64Array(this.width);
  if (!tokens.length && !this.patches) {
    this.index.forEach((j, i) => { if (j >= 0) found[j] += Math.max(this.value[i], 0); });
    const most = found.reduce((a, b) => Math.max(a, b), 1e-30);
    return found.map((x) => x / most);
  }
  const all = !tokens.length;
  const rows = all ? this.index.map((_, i) => i) : tokens;
  for (const i of rows) {
    const row = this.shades.subarray(i * this.width, (i + 1) * this.width);
    row.forEach((x, j) => { found[j] = Math.max(found[j], x); });
  }
  let low = 1, high = 255;
  if (all || own.checked) {
    const real = found.filter((x) => x > 0);
    low = real.reduce((a, b) => Math.min(a, b), 255);
    high = real.reduce((a, b) => Math.max(a, b), 0);
  }
  return found.map((x) => (x > 0 && high > low ? Math.max(0, (x - low) / (high - low)) ** 1.6 : 0));
};

Hit.prototype.about = function (i, j) { // a similarity out of its byte
  const shade = this.shades[i * this.width + j];
  return shade ? (this.low + (shade - 1) / 254 * (this.high - this.low)).toFixed(2).replace("-", "−") : null;
};

Hit.prototype.draw = function (choice) {
  const tokens = choice && choice.hit === null ? choice.tokens : [];
  const mine = choice && choice.hit === this.n ? choice.tokens : null;
  const matching = mine ? mine.flatMap((j) => this.won[j]) : tokens;
  const winners = new Set((mine ? mine : matching.map((i) => this.index[i])).filter((j) => j >= 0));
  const strengths = this.strengths(tokens);
  for (const { element, tokens: own } of this.cells) {
    element.style.setProperty("--s", Math.max(...own.map((j) => strengths[j])).toFixed(3));
    element.classList.toggle("on", own.some((j) => winners.has(j)));
    element.classList.toggle("won", !tokens.length && own.some((j) => this.won[j].length));
    element.classList.toggle("kept", isKept(this.n, own));
  }
  const lit = new Set(matching);
  this.rows.forEach((row, i) => row.classList.toggle("on", lit.has(i)));
  if (this.frame) this.paint(strengths, winners, mine);
  this.status.replaceChildren(...this.words(tokens, mine, matching));
};

Hit.prototype.words = function (tokens, mine, matching) {
  const bold = (text) => {
    const b = document.createElement("b"), bdi = document.createElement("bdi");
    bdi.textContent = text;
    b.append(bdi);
    return b;
  };
  const term = (i) => `${this.similarity[i]}${this.share[i] ? `, ${this.share[i]} of the score` : ""}`;
  const list = [];
  if (mine) {
    list.push(bold(this.labels[mine[0]]));
    if (!matching.length) {
      const near = data.query.map((_, i) => [this.shades[i * this.width + mine[0]], i]).sort((a, b) => b[0] - a[0])[0];
      list.push(" was matched by no query token");
      if (near && near[0]) list.push("; the nearest is ", bold(data.query[near[1]]), `, about ${this.about(near[1], mine[0])}`);
      return list;
    }
    list.push(" was matched by ");
    matching.forEach((i, n) => list.push(n ? "; " : "", bold(data.query[i]), ` ${term(i)}`));
    return list;
  }
  if (!tokens.length) return [this.patches ? "Shaded by the largest similarity of all query tokens; frames are what they matched" : "Shaded by what each token brings to the score; underlined are those that query tokens matched"];
  tokens.forEach((i, n) => {
    const j = this.index[i];
    list.push(n ? "; " : "", bold(data.query[i]));
    if (this.nothing[i] === "masked") list.push(" is masked");
    else list.push(" → ", j < 0 ? this.nothing[i] : bold(this.labels[j]), ` ${term(i)}`);
  });
  return list;
};

Hit.prototype.paint = function (strengths, winners, mine) {
  const { rows, columns, tokens } = this.patches;
  const canvas = this.frame.querySelector("canvas"), context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const pixels = new DataView(image.data.buffer);
  tokens.forEach((j, n) => pixels.setUint32(4 * n, 0xec681400 | (j < 0 ? 0 : Math.round(190 * strengths[j]))));
  context.putImageData(image, 0, 0);
  const chosen = winners.size > 0 || mine;
  const marks = [];
  this.boxes.forEach(([top, bottom, left, right], j) => {
    if (!(chosen ? winners.has(j) : this.won[j].length)) return;
    const mark = document.createElement("i");
    mark.className = mine ? "at" : chosen ? "on" : "";
    Object.assign(mark.style, {
      left: `${100 * left / columns}%`, top: `${100 * top / rows}%`,
      width: `${100 * (right - left + 1) / columns}%`, height: `${100 * (bottom - top + 1) / rows}%`,
    });
    marks.push(mark);
  });
  this.frame.querySelector(".marks").replaceChildren(...marks);
};

function isKept(hit, tokens) {
  return Boolean(kept) && kept.hit === hit && same(kept.tokens, tokens);
}

function same(a, b) {
  return a.length === b.length && a.every((x, n) => x === b[n]);
}

function draw() {
  drawn = 0;
  const choice = pointed || kept;
  const lit = new Set(!choice ? [] : choice.hit === null ? choice.tokens : choice.tokens.flatMap((j) => hits[choice.hit].won[j]));
  for (const { element, tokens } of queryCells) {
    element.classList.toggle("on", tokens.some((i) => lit.has(i)));
    element.classList.toggle("kept", isKept(null, tokens));
    element.setAttribute("aria-pressed", isKept(null, tokens));
  }
  all.setAttribute("aria-pressed", !choice);
  for (const hit of hits) {
    hit.draw(choice);
    if (!choice) continue;
    // what was not pointed at itself comes into view in its own box
    const source = choice.source;
    const row = hit.rows.find((each) => each.classList.contains("on"));
    if (row && source !== "row") reveal(hit.table, row, 28);
    const cell = hit.cells.find(({ element }) => element.classList.contains("on"));
    if (cell && hit.text && choice.hit === null) reveal(hit.text, cell.element, 0);
  }
  const cell = queryCells.find(({ element }) => element.classList.contains("on"));
  if (choice && choice.source !== "query" && cell) reveal(query, cell.element, 0);
}

function reveal(box, element, above) {
  const outer = box.getBoundingClientRect(), inner = element.getBoundingClientRect();
  if (inner.top < outer.top + above) box.scrollTop -= outer.top + above - inner.top;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
}

function soon() {
  drawn = drawn || requestAnimationFrame(draw);
}

// What an element stands for: query tokens (hit null) or document tokens of a hit.
function choiceOf(target) {
  const element = target.closest(".t, tr[data-q]");
  if (!element) return null;
  if (element.dataset.q) return { hit: null, tokens: [Number(element.dataset.q)], source: "row" };
  const section = element.closest(".hit");
  return { hit: section ? Number(section.dataset.hit) : null, tokens: numbers(element.dataset.t), source: section ? "text" : "query" };
}

function patchAt(frame, event) {
  const hit = hits[Number(frame.closest(".hit").dataset.hit)], { rows, columns } = hit.patches;
  const box = frame.querySelector("canvas").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * columns);
  const row = Math.floor((event.clientY - box.top) / box.height * rows);
  if (row < 0 || row >= rows || column < 0 || column >= columns) return null;
  hit.cursor = row * columns + column;
  return patch(hit);
}

function patch(hit) {
  const token = hit.patches.tokens[hit.cursor];
  return token < 0 ? null : { hit: hit.n, tokens: [token], source: "frame" };
}

function point(choice) {
  if (JSON.stringify(choice) === JSON.stringify(pointed)) return;
  pointed = choice;
  soon();
}

function keep(choice) {
  kept = choice && kept && kept.hit === choice.hit && same(kept.tokens, choice.tokens) ? null : choice;
  soon();
}

function say() {
  draw();
  const choice = pointed || kept;
  const told = choice && choice.hit !== null ? [hits[choice.hit]] : hits.slice(0, 3);
  said.textContent = told.map((hit) => (hits.length > 1 ? `${hit.n + 1}: ` : "") + hit.status.textContent).join(". ");
}

document.addEventListener("pointermove", (event) => {
  const frame = event.target.closest(".frame");
  point(frame ? patchAt(frame, event) : choiceOf(event.target));
});
document.documentElement.addEventListener("pointerleave", () => point(null));
document.addEventListener("focusin", (event) => {
  if (!event.target.matches(":focus-visible")) return;
  const frame = event.target.closest(".frame");
  point(frame ? patch(hits[Number(frame.closest(".hit").dataset.hit)]) : choiceOf(event.target));
  if (pointed) say();
});
document.addEventListener("focusout", () => point(null));
document.addEventListener("click", (event) => {
  const frame = event.target.closest(".frame");
  const choice = frame ? patchAt(frame, event) : choiceOf(event.target);
  if (choice) keep(choice);
});
all.addEventListener("click", () => { pointed = null; keep(null); });
own.addEventListener("change", soon);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    pointed = null;
    keep(null);
    return;
  }
  const frame = event.target.closest(".frame"), cell = event.target.closest(".t");
  if (frame) steer(frame, event);
  else if (cell) move(cell, event);
});

function steer(frame, event) {
  const hit = hits[Number(frame.closest(".hit").dataset.hit)], { rows, columns } = hit.patches;
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const from = hit.cursor;
  if (event.key === "Enter" || event.key === " ") keep(patch(hit));
  else if (!step) return;
  event.preventDefault();
  if (!step) return;
  do { // as far as the next patch
    const row = Math.floor(hit.cursor / columns) + step[0], column = hit.cursor % columns + step[1];
    if (row < 0 || row >= rows || column < 0 || column >= columns) break;
    hit.cursor = row * columns + column;
  } while (hit.patches.tokens[hit.cursor] === hit.patches.tokens[from]);
  point(patch(hit));
  say();
}

function move(cell, event) {
  const group = cell.closest(".group"), cells = [...group.querySelectorAll(".t")], at = cells.indexOf(cell);
  const right = getComputedStyle(group).direction === "rtl" ? -1 : 1;
  let to = at;
  switch (event.key) {
    case "ArrowLeft": to = at - right; break;
    case "ArrowRight": to = at + right; break;
    case "ArrowUp": to = line(cells, at, -1); break;
    case "ArrowDown": to = line(cells, at, 1); break;
    case "Home": to = 0; break;
    case "End": to = cells.length - 1; break;
    case "Enter": case " ": keep(choiceOf(cell)); event.preventDefault(); return;
    default: return;
  }
  event.preventDefault();
  const next = cells[to];
  if (!next || to === at) return;
  cell.tabIndex = -1; // the group has one stop for the tabulator, where one was last
  next.tabIndex = 0;
  next.focus();
}

// The cell of the line above or below that is nearest.
function line(cells, at, step) {
  const from = cells[at].getBoundingClientRect(), middle = (from.left + from.right) / 2;
  let best = at, least = Infinity, height = null;
  for (let n = at + step; n >= 0 && n < cells.length; n += step) {
    const box = cells[n].getBoundingClientRect(), away = (box.top - from.top) * step;
    if (away < from.height / 2) continue;
    height = height === null ? box.top : height;
    if (Math.abs(box.top - height) > from.height / 2) break;
    const distance = Math.abs((box.left + box.right) / 2 - middle);
    if (distance < least) [best, least] = [n, distance];
  }
  return best;
}

draw();
