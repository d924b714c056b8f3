// The list: filters, order, and rows for what is in sight only, so that its length does not matter.

const ROW_PIXELS = 24, SPARE_ROWS = 8;
const RANGES = ["reward", "length", "staleness"];
let listed = [], chosen = -1, lowered = null;
const nShared = sharedPrefix(DATA.prompts.texts);

// Characters with which all prompts begin (a chat template's), which the list leaves out.
function sharedPrefix(texts) {
  let n = texts.length > 1 ? texts[0].length : 0;
  for (const text of texts) {
    n = Math.min(n, text.length);
    while (!texts[0].startsWith(text.slice(0, n))) n--;
  }
  return n;
}

function bounds(name) {
  return ["from", "to"].map((side) => {
    const input = byId(`${name}-${side}`), text = input.value.trim().replace("−", "-"), value = text === "" ? null : Number(text);
    input.setAttribute("aria-invalid", Number.isNaN(value));
    return Number.isNaN(value) ? null : value;
  });
}

function applyFilters() {
  const search = byId("search").value.toLowerCase(), tag = byId("tag").value, order = byId("order").value;
  if (search && lowered === null) lowered = DATA.prompts.texts.map((text) => text.toLowerCase());
  const inPrompt = search ? lowered.map((text) => text.includes(search)) : null;
  const limits = RANGES.map((name) => [rows[name], ...bounds(name)]).filter(([, from, to]) => from !== null || to !== null);
  listed = [];
  for (let i = 0; i < nRollouts; i++) {
    if (inPrompt && !inPrompt[rows.prompt[i]]) continue;
    if (tag !== "" && rows.tag[i] !== Number(tag)) continue;
    // A missing reward is NaN and a staleness that is not known -1: no range has them.
    if (!limits.every(([column, from, to]) => !Number.isNaN(column[i]) && (column !== rows.staleness || column[i] >= 0)
      && (from === null || column[i] >= from) && (to === null || column[i] <= to))) continue;
    listed.push(i);
  }
  const sign = byId("down").checked ? -1 : 1;
  if (order) {
    const column = rows[order], last = (i) => Number.isNaN(column[i]) || (order === "staleness" && column[i] < 0);
    listed.sort((a, b) => last(a) - last(b) || (last(a) ? 0 : sign * (column[a] - column[b])) || a - b);
  } else if (sign < 0) listed.reverse();
  byId("count").textContent = `${listed.length.toLocaleString("en")} of ${nRollouts.toLocaleString("en")} rollouts`;
  byId("space").style.height = `${listed.length * ROW_PIXELS}px`;
  byId("list").scrollTop = 0;
  drawRows();
}

function drawRows() {
  const list = byId("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_PIXELS) - SPARE_ROWS);
  const last = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_PIXELS) + SPARE_ROWS);
  const drawn = [];
  for (let place = first; place < last; place++) {
    const i = listed[place], gap = rows.gap[i];
    const texts = [String(rows.step[i]), visible(DATA.tag[rows.tag[i]]), Number.isNaN(rows.reward[i]) ? "–" : figure(rows.reward[i]),
      String(rows.length[i]), rows.staleness[i] < 0 ? "–" : String(rows.staleness[i]), Number.isNaN(gap) ? "–" : signed(gap),
      (nShared ? "…" : "") + excerpt(DATA.prompts.texts[rows.prompt[i]].slice(nShared))];
    const row = make("div", { className: "row", role: "option", id: `row-${i}`, "aria-selected": i === chosen, dataset: { place } },
      ...texts.map((text) => make("span", {}, text)));
    row.setAttribute("aria-posinset", place + 1);
    row.setAttribute("aria-setsize", listed.length);
    row.style.top = `${place * ROW_PIXELS}px`;
    drawn.push(row);
  }
  byId("space").replaceChildren(...drawn);
  if (byId(`row-${chosen}`)) list.setAttribute("aria-activedescendant", `row-${chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

// Choose a rollout by its index, also one that the filters hide.
function choose(index) {
  chosen = index;
  const place = listed.indexOf(index), list = byId("list");
  if (place >= 0) {
    const top = place * ROW_PIXELS;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_PIXELS > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_PIXELS - list.clientHeight;
  }
  drawRows();
  showRollout(index);
}

function move(by) {
  if (!listed.length) return;
  const place = listed.indexOf(chosen);
  choose(listed[Math.min(listed.length - 1, Math.max(0, place < 0 ? 0 : place + by))]);
}

function listKey(event) {
  const page = Math.max(1, Math.floor(byId("list").clientHeight / ROW_PIXELS) - 1);
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -nRollouts, End: nRollouts }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  move(by);
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") byId("list").focus();
    return;
  }
  const layers = { 1: "gap", 2: "version", 3: "origin" };
  if (event.key === "/") byId("search").focus();
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "l") byId("list").focus();
  else if (event.key === "t" && shown && shown.length) goTo(current < 0 ? Math.min(shown.nPrompt, shown.length - 1) : current);
  else if ((event.key === "w" || event.key === "W") && shown) nextWorst(event.key === "w" ? 1 : -1);
  else if (layers[event.key]) recolour(layers[event.key]);
  else return;
  event.preventDefault();
}

function recolour(name) {
  const focused = byId("text").contains(document.activeElement);
  colourBy(name);
  if (focused) goTo(current);
}

function start() {
  const facts = DATA.facts;
  byId("run").textContent = visible(facts.run);
  byId("summary").textContent = 
    `${nRollouts.toLocaleString("en")} of ${facts.n_rollouts.toLocaleString("en")} rollouts of ${visible(facts.record)}`;
  byId("notes").replaceChildren(...facts.notes.map((note) => make("li", {}, visible(note))));
  byId("tag").append(make("option", { value: "" }, "all"), ...DATA.tag.map((name, i) => make("option", { value: i }, visible(name) || "(none)")));
  byId("filters").addEventListener("input", applyFilters);
  byId("filters").addEventListener("reset", () => setTimeout(applyFilters));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("list").addEventListener("scroll", drawRows);
  byId("list").addEventListener("keydown", listKey);
  byId("space").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(listed[row.dataset.place]);
  });
  const text = byId("text");
  text.addEventListener("mouseover", (event) => event.target.dataset.i !== undefined && tell(Number(event.target.dataset.i)));
  text.addEventListener("click", (event) => event.target.dataset.i !== undefined && goTo(Number(event.target.dataset.i)));
  text.addEventListener("keydown", tokenKey);
  byId("earlier").addEventListener("click", () => { firstShown -= TOKENS_SHOWN; showTokens(); });
  byId("later").addEventListener("click", () => { firstShown += TOKENS_SHOWN; showTokens(); });
  byId("teacher").addEventListener("change", (event) => { teacher = Number(event.target.value); showTokens(); showWorst(); });
  document.addEventListener("keydown", key);
  const redraw = () => { drawRows(); if (shown) drawStrips(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  applyFilters();
  if (listed.length) choose(listed[0]);
}

start();
