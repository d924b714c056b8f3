// The chosen rollout: three strips, its text token by token, its worst tokens, its turns, and others of its prompt.

const LAYERS = [["gap", "1 student − teacher"], ["version", "2 version"], ["origin", "3 origin"]];
const GAP_EDGES = [-4, -1, -0.3, -0.1, 0.1, 0.3, 1, 4];
const GAP_NAMES = ["below −4", "−4 to −1", "−1 to −0.3", "−0.3 to −0.1", "about 0", "0.1 to 0.3", "0.3 to 1", "1 to 4", "above 4"];
const ORIGINS = { prompt: "prompt", given: "given by the environment", trained: "sampled, trained", kept: "sampled, not trained" };
const N_VERSION_COLOURS = 8;
const TOKENS_SHOWN = 4000; // at a time
const SAME_SHOWN = 200;

let shown = null, teacher = 0, layer = "gap", firstShown = 0, current = -1, versionsOf = new Map();

function gapClass(gap) {
  return gap === null || Number.isNaN(gap) ? "absent" : `gap-${GAP_EDGES.filter((edge) => gap >= edge).length}`;
}

function classOf(i, which = layer) {
  if (which === "gap") return gapClass(shown.gap(teacher, i));
  if (which === "origin") return `origin-${shown.origin(i)}`;
  const version = shown.version[i];
  return version === null ? "absent" : `version-${versionsOf.get(version) % N_VERSION_COLOURS}`;
}

function showRollout(index) {
  shown = rollout(index);
  teacher = Math.min(teacher, Math.max(0, shown.teachers.length - 1));
  versionsOf = new Map([...new Set(shown.version.filter((name) => name !== null))].map((name, i) => [name, i]));
  current = -1;
  byId("name").textContent = visible(shown.id);
  const flags = rows.flags[index], reward = rows.reward[index], finish = DATA.finish[rows.finish[index]];
  byId("about").textContent = [
    `task ${rows.task[index]}, sample ${rows.sample[index]} of ${shown.group_size}`,
    `tag ${visible(DATA.tag[rows.tag[index]]) || "(none)"}`,
    `last in the batch of version ${shown.batch}`,
    Number.isNaN(reward) ? "no reward" : `reward ${reward}`,
    flags & FLAGS.unfinished ? "the record has only its beginning" : `ended: ${visible(finish) || "unknown"}`,
    `${shown.n_turns} turn${shown.n_turns === 1 ? "" : "s"}`,
    `${rows.length[index]} sampled tokens, ${rows.trained[index]} trained`,
    `teachers: ${shown.teachers.map(visible).join(", ") || "none"}`,
    ...(flags & FLAGS.offline ? ["mixed in from another recording"] : []),
    ...(flags & FLAGS.leftOut ? ["left out of its step: not finite, or not readable"] : []),
  ].join(" · ");
  const choice = byId("teacher");
  choice.replaceChildren(...shown.teachers.map((name, i) => make("option", { value: i }, visible(name))));
  choice.value = teacher;
  byId("teacher-label").hidden = shown.teachers.length < 2;
  byId("readout").textContent = "Point at a token, or press t and the arrow keys.";
  firstShown = 0;
  showTokens();
  showWorst();
  showTurns();
  showSame();
  byId("detail").scrollTop = 0;
}

// ---------------------------------------------------------------------------------------------------- strips, text

function showTokens() {
  drawStrips();
  showLegend();
  const end = Math.min(shown.length, firstShown + TOKENS_SHOWN), all = document.createDocumentFragment();
  const worst = new Set(shown.worst.filter(([m]) => m === teacher).map(([, i]) => i));
  const starts = new Map(shown.branches);
  for (let i = firstShown; i < end; i++) {
    if (starts.has(i)) all.append(make("span", { className: "fork" }));
    const text = piece(shown.tokens[i]), span = make("span", { className: classOf(i), tabIndex: -1, dataset: { i } });
    if (worst.has(i)) span.classList.add("worst");
    span.textContent = visible(text) + (text.endsWith("\n") ? "\n" : "") || "∅";
    all.append(span);
  }
  byId("text").replaceChildren(all);
  byId("pages").hidden = shown.length <= TOKENS_SHOWN;
  byId("shown").textContent = `tokens ${firstShown} to ${end - 1} of ${shown.length}`;
  byId("earlier").disabled = firstShown === 0;
  byId("later").disabled = end === shown.length;
}

function showLegend() {
  const keys = layer === "gap" ? [...GAP_NAMES.map((name, i) => [`gap-${i}`, name]), ["absent", "no log-probs"]]
    : layer === "origin" ? Object.entries(ORIGINS).map(([name, text]) => [`origin-${name}`, text])
    : [...versionsOf].map(([name, i]) => [`version-${i % N_VERSION_COLOURS}`, name]);
  byId("legend").replaceChildren(...keys.slice(0, 40).map(([name, text]) => make("span", { className: "key" }, make("i", { className: name }), text)),
    ...(keys.length > 40 ? [`and ${keys.length - 40} more`] : []));
}

function drawStrips() {
  const parent = byId("strips"), style = getComputedStyle(document.documentElement);
  if (!parent.childElementCount) {
    for (const [name, label] of LAYERS) {
      const button = make("button", { type: "button", onclick: () => colourBy(name), dataset: { layer: name } }, label);
      const canvas = make("canvas", { dataset: { layer: name }, role: "img" });
      const place = (event) => Math.floor((event.offsetX / canvas.clientWidth) * shown.length);
      canvas.onmousemove = (event) => tell(Math.min(shown.length - 1, Math.max(0, place(event))));
      canvas.onclick = (event) => goTo(Math.min(shown.length - 1, Math.max(0, place(event))));
      parent.append(make("div", { className: "strip" }, button, canvas));
    }
  }
  for (const canvas of parent.querySelectorAll("canvas")) {
    const which = canvas.dataset.layer, n = shown.length;
    const width = (canvas.width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio)));
    const height = (canvas.height = 20 * devicePixelRatio), paint = canvas.getContext("2d");
    for (let x = 0; x < Math.min(width, n); x++) {
      // Where a pixel stands for several tokens, it shows the one with the largest difference.
      const per = Math.min(width, n), from = Math.floor((x * n) / per), to = Math.max(from + 1, Math.floor(((x + 1) * n) / per));
      let i = from;
      if (which === "gap") for (let j = from; j < to; j++) if (Math.abs(shown.gap(teacher, j) ?? 0) > Math.abs(shown.gap(teacher, i) ?? 0)) i = j;
      paint.fillStyle = style.getPropertyValue(`--${classOf(i, which)}`) || "transparent";
      const left = Math.round((x * width) / per), right = Math.round(((x + 1) * width) / per);
      paint.fillRect(left, 0, Math.max(1, right - left), height);
    }
    canvas.setAttribute("aria-label", `${n} tokens by ${which}; the text below has the values`);
    canvas.previousSibling.setAttribute("aria-pressed", which === layer);
  }
}

function colourBy(name) {
  layer = name;
  if (shown) showTokens();
}

function tell(i) {
  const s = shown.student(i), q = shown.teacher(teacher, i), gap = shown.gap(teacher, i), trained = shown.trained[i];
  const parts = [`token ${i} “${visible(piece(shown.tokens[i]))}” (id ${tokenIds[shown.tokens[i]]})`, ORIGINS[shown.origin(i)]];
  if (shown.version[i] !== null) {
    parts.push(`student ${figure(s, 3)}`, `teacher ${figure(q, 3)}`, `student − teacher ${gap === null ? "–" : signed(gap, 3)} nats`);
    if (shown.ended(teacher, i)) parts.push("a log-prob below −63.99 is shown as that");
    parts.push(`version ${shown.version[i]}`);
  }
  if (trained) parts.push(`trained from version ${trained.version}, staleness ${trained.staleness ?? "not known"}`);
  const follows = shown.branches.find(([start]) => start === i);
  if (follows) parts.push(follows[1] ? `a branch behind token ${follows[1] - 1}` : "a new root");
  const text = parts.join(" · ");
  byId("readout").textContent = text;
  return text;
}

// Show a token and give it the focus.
function goTo(i) {
  if (i < firstShown || i >= firstShown + TOKENS_SHOWN) {
    firstShown = Math.floor(i / TOKENS_SHOWN) * TOKENS_SHOWN;
    showTokens();
  }
  current = i;
  const span = byId("text").querySelector(`[data-i="${i}"]`);
  span.setAttribute("aria-label", tell(i));
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block: "nearest" });
}

function nextWorst(direction) {
  const places = shown.worst.filter(([m]) => m === teacher).map(([, i]) => i);
  if (!places.length) return;
  const at = places.indexOf(current); // -1: elsewhere; "next" is then the first, "previous" the last
  goTo(places[at < 0 && direction < 0 ? places.length - 1 : (at + direction + places.length) % places.length]);
}

function tokenKey(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move === undefined || current < 0) return;
  event.preventDefault();
  goTo(Math.min(shown.length - 1, Math.max(0, current + move)));
}

// -------------------------------------------------------------------------------------------------- the other parts

function table(heads, lines) {
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...lines.map((cells) => make("tr", {}, ...cells.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", { className: "number" }, cell)))))));
}

function showWorst() {
  const worst = shown.worst.filter(([m]) => m === teacher), student = DATA.facts.alternatives_of === "student";
  const others = student ? "the student's likeliest tokens, by the teacher" : "the teacher's likeliest tokens";
  const lines = worst.map(([m, i, alternatives]) => [
    make("button", { type: "button", onclick: () => goTo(i) }, `token ${i} `, make("code", {}, visible(piece(shown.tokens[i])))),
    signed(shown.gap(m, i)), figure(shown.student(i)), figure(shown.teacher(m, i)),
    alternatives === null ? make("span", { className: "excerpt" }, "not in the record")
      : make("span", {}, ...alternatives.flatMap(([number, value]) => [make("code", {}, visible(piece(number))), ` ${figure(value)}  `])),
  ]);
  byId("worst").replaceChildren(worst.length ? table(["token", "student − teacher", "student", "teacher", others], lines)
    : make("p", {}, "At no scored token was the student surer than the teacher by 0.1 nat or more."));
}

// Runs of tokens of one author, cut where branches begin and where they leave.
function turns() {
  const cuts = new Set([0, shown.length, shown.nPrompt]), rewards = new Map(shown.turn_rewards);
  for (let i = 1; i < shown.length; i++) if ((shown.version[i] === null) !== (shown.version[i - 1] === null)) cuts.add(i);
  for (const [start, follows] of shown.branches) cuts.add(start).add(follows);
  for (const [end] of shown.turn_rewards) cuts.add(end);
  const edges = [...cuts].filter((i) => i <= shown.length).sort((a, b) => a - b), starts = new Map(shown.branches);
  return edges.slice(0, -1).map((start, n) => ({
    start, end: edges[n + 1], follows: starts.get(start), reward: rewards.get(edges[n + 1]), forks: [],
    author: start < shown.nPrompt ? "prompt" : shown.version[start] === null ? "given" : "student",
  }));
}

// Lists of runs that continue each other; a branch is a list of its own, inside the run that it leaves.
function turnTree(runs) {
  const lists = [];
  let list = null;
  for (const run of runs) {
    if (run.follows !== undefined || list === null) {
      list = [];
      const from = run.follows ? runs.find((one) => one.end === run.follows) : undefined;
      (from ? from.forks : lists).push(list);
    }
    list.push(run);
  }
  return lists;
}

function showTurns() {
  const runs = turns();
  byId("turns-part").hidden = runs.length <= 2 && !shown.branches.length;
  if (byId("turns-part").hidden) return byId("turns").replaceChildren();
  const entry = (run) => make("li", {},
    make("button", { type: "button", onclick: () => goTo(run.start) }, `${run.author}, tokens ${run.start} to ${run.end - 1}`), " ",
    ...(run.follows === 0 ? ["(a new root) "] : []), ...(run.reward !== undefined ? [`reward ${run.reward} `] : []),
    make("span", { className: "excerpt" }, textOf(shown.tokens.subarray(run.start, run.end), 90)),
    ...run.forks.map((list) => nested(list)));
  const nested = (list) => make("ul", { className: "tree" }, ...list.map(entry));
  byId("turns").replaceChildren(...turnTree(runs).map(nested));
}

function showSame() {
  const prompt = rows.prompt[shown.index], all = [];
  for (let i = 0; i < nRollouts; i++) if (rows.prompt[i] === prompt) all.push(i);
  const place = all.indexOf(shown.index), first = Math.max(0, Math.min(place - SAME_SHOWN / 2, all.length - SAME_SHOWN));
  const some = all.slice(first, first + SAME_SHOWN).map((i) => [i, rollout(i)]);
  const lines = some.map(([i, one]) => {
    const button = make("button", { type: "button", onclick: () => choose(i) }, i === shown.index ? "this one" : visible(one.id));
    const sampled = one.tokens.subarray(one.nPrompt);
    return [button, [...new Set(one.spans.map(([, , name]) => name))].join(", "), Number.isNaN(rows.reward[i]) ? "–" : String(rows.reward[i]),
      String(rows.length[i]), figure(Number.isNaN(rows.gap[i]) ? null : rows.gap[i]), make("code", {}, textOf(sampled, 140))];
  });
  byId("same").replaceChildren(
    make("p", {}, `${all.length} rollout${all.length === 1 ? "" : "s"} in this page` + (some.length < all.length ? `; ${some.length} of them, around this one:` : ":")),
    table(["rollout", "versions", "reward", "tokens", "mean s − q", "text after the prompt"], lines));
}
