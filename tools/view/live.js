// Asks the server that sent this page for what was recorded since, and adds it. The reader's place stays as it is.

const ASK_MS = 1000, ASK_HIDDEN_MS = 10000, ASK_AGAIN_MS = 5000;
let cursor = DATA.live.cursor;

function joined(old, more, length = old.length + more.length) {
  const whole = new old.constructor(length);
  whole.set(old);
  whole.set(more, length - more.length);
  return whole;
}

function growBlock(number, more) {
  const known = number < cursor.blocks ? new Uint8Array(block(number)) : new Uint8Array(0);
  decodedBlocks.delete(number);
  grownBlocks.set(number, joined(known, more).buffer);
}

function growNames(got) {
  for (const name of got.tag) {
    byId("tag").append(make("option", { value: DATA.tag.length }, visible(name) || "(none)"));
    DATA.tag.push(name);
  }
  for (const name of got.finish) DATA.finish.push(name);
  for (const text of got.pieces.texts) DATA.pieces.texts.push(text);
  tokenIds = joined(tokenIds, new Int32Array(decoded(got.pieces.ids).buffer));
}

function growPrompts(got) {
  const texts = DATA.prompts.texts, stored = columns(got.columns);
  for (const text of got.texts) {
    texts.push(text);
    if (lowered !== null) lowered.push(text.toLowerCase());
    if (texts.length > 1) nShared = sharedPrefix([texts[0].slice(0, texts.length === 2 ? undefined : nShared), text]);
  }
  for (const name of Object.keys(prompts)) prompts[name] = joined(prompts[name], stored[name]);
}

function growRows(got, index) {
  const changed = columns(got.columns);
  for (const name of Object.keys(rows)) {
    if (got.n_rollouts > nRollouts) rows[name] = joined(rows[name], [], got.n_rollouts);
    index.forEach((row, i) => (rows[name][row] = changed[name][i]));
  }
  nRollouts = got.n_rollouts;
}

// Add an answer of the server to the page.
function grow(got) {
  const index = new Uint32Array(decoded(got.index).buffer);
  for (const [number, more] of got.blocks) growBlock(number, decoded(more));
  growNames(got);
  growPrompts(got.prompts);
  growRows(got, index);
  cursor = got.cursor;
  if (!index.length) return;
  applyFilters(null, true);
  showAgain(index);
}

// The chosen rollout, if it has changed, and the others of its prompt. Focus and scroll position stay.
function showAgain(index) {
  if (shown === null) return void (listed.length && choose(listed[0]));
  const detail = byId("detail"), top = detail.scrollTop;
  if (index.includes(shown.index)) {
    const inText = byId("text").contains(document.activeElement), at = current, first = firstShown;
    showRollout(shown.index);
    current = Math.min(at, shown.length - 1); // it is shorter if a learner went back
    firstShown = first < shown.length ? first : 0;
    showTokens();
    if (inText && current >= 0) goTo(current);
  } else if (!byId("same").contains(document.activeElement) && index.some((i) => rows.prompt[i] === rows.prompt[shown.index])) showSame();
  detail.scrollTop = top;
}

function tellStatus(status) {
  const steps = `step ${status.steps.toLocaleString("en")}`, parts = [];
  if (status.error) parts.push(`the record cannot be read any more: ${visible(status.error)}`);
  else if (status.ended) parts.push(`the run ended (${visible(status.ended)}) at ${steps}`);
  else parts.push(`live, ${steps}`);
  if (status.n_not_shown) parts.push(`the page is full, and ${status.n_not_shown.toLocaleString("en")} newer rollouts are not in it: reload it for a selection from the whole run`);
  byId("live").textContent = parts.join(" · ");
  byId("summary").textContent = summaryText(status.n_recorded);
}

async function follow() {
  byId("live").hidden = false;
  tellStatus(DATA.live.status);
  let wait = ASK_MS;
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? Math.max(wait, ASK_HIDDEN_MS) : wait));
    try {
      const answer = await fetch(`new?have=${encodeURIComponent(JSON.stringify(cursor))}`);
      if (answer.status === 410) {
        byId("live").textContent = "not live any more: the server made a newer page; reload this one";
        return;
      }
      if (!answer.ok) throw new Error(answer.statusText);
      const got = await answer.json();
      grow(got);
      tellStatus(got.status);
      wait = got.more ? 0 : ASK_MS;
    } catch (error) {
      byId("live").textContent = `not live: the server does not answer (${error.message}); what is here stays`;
      wait = ASK_AGAIN_MS;
    }
  }
}

follow();
