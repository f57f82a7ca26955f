// A slider adds examples to the evidence and removes them; the predictive distribution narrows and widens.

import { isCalm, latentsOf, latest, nats } from "./common.js";
import { pixelsOf } from "./drawing.js";
import * as evidence from "./evidence.js";
import { paint, showImages } from "./ink.js";
import { showMap } from "./map.js";
import * as model from "./model.js";

const SAMPLES = 8;
const TEMPERATURE = 0.4;
const SEEN_AT_FIRST = 3; // examples
const PAUSE = 700; // milliseconds between them

export function forget(root, page) {
  const dim = page.size ** 2;
  const symbols = page.symbols.map((drawings) => drawings.map((strokes) => pixelsOf(strokes, page.size)));
  const [images, next] = [symbols[0].slice(0, -1), symbols[0].at(-1)];
  const landmarks = symbols.slice(1).map(([first]) => first); // one drawing of each other symbol
  const [slider, map, grid] = ["input", ".map", ".samples"].map((name) => root.querySelector(name));
  const toggles = images.map((image, i) => toggleIn(root.querySelector(".seen"), image, page.size, `Example ${i + 1}`));
  const noise = model.uniform(2 * SAMPLES * dim);
  const memory = new Memory(dim);
  slider.max = images.length;
  showImages(grid, Array(SAMPLES).fill(new Uint8Array(dim)), page.size);

  const update = latest(root, async () => {
    const isSeen = toggles.map((toggle) => toggle.ariaPressed === "true");
    slider.value = isSeen.filter(Boolean).length;
    const latents = await latentsOf([...images, next, ...landmarks]);
    const set = memory.with(latents.slice(0, images.length).filter((_, i) => isSeen[i]));
    const { dimensions } = page.models[page.model];
    const [prior, now] = await model.predict([evidence.empty(dim), set], dimensions);
    const place = (z) => dimensions.map((dimension) => z[dimension]);
    const dots = images.map((_, i) => ({ place: place(latents[i]), isSeen: isSeen[i] }));
    showMap(map, prior, now, dots, landmarks.map((image, i) => ({ place: place(latents[images.length + 1 + i]), image })));
    showImages(grid, await model.sample(set, noise, TEMPERATURE), page.size);
    const gain = (await model.score([latents[images.length]], [set])).scores[0][0];
    const trace = memory.error();
    root.querySelector(".number").textContent =
      `${set.count} seen: log p of one more goblet changes by ${gain < 0 ? "" : "+"}${nats(gain)}. ` +
      `What was forgotten leaves ${trace ? `a trace of ${trace.toExponential(0)}` : "no trace"}.`;
  });
  const see = (count) => {
    toggles.forEach((toggle, i) => (toggle.ariaPressed = String(i < count)));
    return update();
  };
  let isTouched = false;
  slider.oninput = () => {
    isTouched = true;
    see(Number(slider.value));
  };
  toggles.forEach((toggle) => {
    toggle.onclick = () => {
      isTouched = true;
      toggle.ariaPressed = String(toggle.ariaPressed !== "true");
      update();
    };
  });
  map.addEventListener("colours", update);
  introduce(see, () => isTouched);
  return update;
}

// Examples one after the other, until the visitor takes over.
async function introduce(see, isTouched) {
  if (isCalm()) return see(SEEN_AT_FIRST);
  for (let count = 0; count <= SEEN_AT_FIRST && !isTouched(); count++) {
    await see(count);
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

function toggleIn(parent, image, size, label) {
  const toggle = document.createElement("button");
  toggle.ariaPressed = "false";
  toggle.ariaLabel = label;
  toggle.append(document.createElement("canvas"));
  parent.append(toggle);
  paint(toggle.firstChild, image, size);
  return toggle;
}

// Evidence that changes by one element at a time: what is no longer wanted is removed, what is new is added.
class Memory {
  constructor(dim) {
    Object.assign(this, { dim, set: evidence.empty(dim), elements: [] });
  }

  with(wanted) {
    for (const z of this.elements) if (!wanted.includes(z)) this.set = evidence.remove(this.set, z);
    for (const z of wanted) if (!this.elements.includes(z)) this.set = evidence.add(this.set, z);
    this.elements = wanted;
    return this.set;
  }

  // The largest difference from the evidence of a set that never had other elements.
  error() {
    const fresh = evidence.of(this.elements, this.dim);
    const differences = (field) => this.set[field].map((value, i) => Math.abs(value - fresh[field][i]));
    return Math.max(...differences("mean"), ...differences("scatter"));
  }
}
