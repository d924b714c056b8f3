"use strict";
// Reads the data blocks of this file. tools/view/page.py describes their layout.

const ABSENT = 65535, NOT_FINITE = 65534, LOWEST = 65533, STEPS = 1024;
const FLAGS = { offline: 1, leftOut: 2, unfinished: 4 };
const TYPES = { "<u4": Uint32Array, "<i4": Int32Array, "<f4": Float32Array };

function decoded(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function columns(stored) {
  return Object.fromEntries(Object.entries(stored).map(([name, [type, base64]]) => [name, new TYPES[type](decoded(base64).buffer)]));
}

const DATA = JSON.parse(document.getElementById("data").textContent);
const rows = columns(DATA.columns), prompts = columns(DATA.prompts.columns);
const tokenIds = new Int32Array(decoded(DATA.pieces.ids).buffer);
const nRollouts = rows.step.length;

const decodedBlocks = new Map();
const MOST_BLOCKS = 24; // of half a megabyte, kept decoded

function block(number) {
  let found = decodedBlocks.get(number);
  if (found === undefined) {
    found = decoded(document.getElementById(`block-${number}`).textContent).buffer;
    if (decodedBlocks.size >= MOST_BLOCKS) decodedBlocks.delete(decodedBlocks.keys().next().value);
    decodedBlocks.set(number, found);
  }
  return found;
}

function promptTokens(number) {
  const buffer = block(prompts.block[number]), at = prompts.at[number];
  return new Uint32Array(buffer, at + 4, new Uint32Array(buffer, at, 1)[0]);
}

// A log-prob in nats; null: none was recorded; NaN: it was not finite.
function logprob(code) {
  return code === ABSENT ? null : code === NOT_FINITE ? NaN : code === 0 ? 0 : -code / STEPS;
}

// One rollout: the numbers of its tokens, log-probs, versions and so on, each by its place in the rollout.
function rollout(index) {
  const buffer = block(rows.block[index]), at = rows.at[index];
  const [nJson, n, nTeachers] = new Uint32Array(buffer, at, 3);
  const details = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, at + 12, nJson)));
  let from = at + 12 + nJson;
  const after = new Uint32Array(buffer, from, n);
  from += 4 * n;
  const student = new Uint16Array(buffer, from, n);
  from += 2 * n;
  const teachers = [];
  for (let i = 0; i < nTeachers; i++, from += 2 * n) teachers.push(new Uint16Array(buffer, from, n));
  const before = promptTokens(rows.prompt[index]), nPrompt = before.length, length = nPrompt + n;
  const tokens = new Uint32Array(length);
  tokens.set(before);
  tokens.set(after, nPrompt);
  const version = new Array(length).fill(null), trained = new Array(length).fill(null);
  for (const [start, end, name] of details.spans) version.fill(name, start, end);
  for (const [start, end, name, staleness] of details.trained) trained.fill({ version: name, staleness }, start, end);
  const one = { index, ...details, length, nPrompt, tokens, version, trained };
  one.branches ??= [];
  one.turn_rewards ??= [];
  one.worst ??= [];
  one.student = (i) => (i < nPrompt ? null : logprob(student[i - nPrompt]));
  one.teacher = (m, i) => (i < nPrompt || m >= nTeachers ? null : logprob(teachers[m][i - nPrompt]));
  one.ended = (m, i) => i >= nPrompt && (student[i - nPrompt] === LOWEST || (m < nTeachers && teachers[m][i - nPrompt] === LOWEST));
  one.gap = (m, i) => {
    const s = one.student(i), q = one.teacher(m, i);
    return s === null || q === null ? null : s - q;
  };
  one.origin = (i) => (i < nPrompt ? "prompt" : version[i] === null ? "given" : trained[i] === null ? "kept" : "trained");
  return one;
}

// ------------------------------------------------------------------------------------------------------------ text

const INVISIBLE = /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffb]/g;
const NAMED = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

// A text with all characters visible that are not, or that would turn the text around them.
function visible(text) {
  return text.replace(INVISIBLE, (c) => NAMED[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function piece(number) {
  return DATA.pieces.texts[number] ?? "?";
}

function textOf(numbers, most = 160) {
  let text = "";
  for (let i = 0; i < numbers.length && text.length <= most; i++) text += piece(numbers[i]);
  return excerpt(text, most);
}

function excerpt(text, most = 160) {
  const short = Array.from(text.slice(0, most + 1));
  return visible(short.length > most ? short.slice(0, most).join("") + "…" : short.join(""));
}

function figure(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "not finite";
  const text = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(text) !== 0 ? "−" : "") + text;
}

function signed(value, digits = 2) {
  return value > 0 && Number(value.toFixed(digits)) !== 0 ? `+${figure(value, digits)}` : figure(value, digits);
}

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("aria-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children); // strings become text nodes, never markup
  return node;
}

const byId = (id) => document.getElementById(id);
