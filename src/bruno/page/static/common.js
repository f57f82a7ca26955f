// What the four panels share.

import * as model from "./model.js";
import { Pad } from "./pad.js";

export const nats = (value) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)} nats`;

// A function that runs `work` for the latest change only, while an earlier one is still running.
export function latest(root, work) {
  let running = null;
  let again = false;
  const all = async () => {
    root.ariaBusy = "true";
    do {
      again = false;
      await work();
    } while (again);
    root.ariaBusy = "false";
  };
  return function update() {
    if (running) again = true;
    return (running ??= all().finally(() => (running = null)));
  };
}

// Pads with these labels; every change updates the panel.
export function padsIn(parent, labels, { size, hint }, onChange) {
  return labels.map((label) => new Pad(parent, { size, label, hint, onChange }));
}

export async function latentsOf(images) {
  return (await model.encode(images)).map(({ z }) => z);
}

// The next of the page's own symbols, each time it is called: eight drawings of it.
export function symbolsInTurn({ symbols }, first = 0) {
  let at = first;
  return () => symbols[at++ % symbols.length];
}

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
