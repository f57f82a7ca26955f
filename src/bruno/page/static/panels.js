// The four things to do. Each panel is a function of its element and the contents of page.json.

import * as evidence from "./evidence.js";
import * as model from "./model.js";
import { paint } from "./drawing.js";
import { Pad } from "./pad.js";

const NEAT = 0.7; // temperature of samples: below 1, they are closer to the typical one

const nats = (value) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)} nats`;

// A function that runs `work` for the latest change only, while an earlier one is still running.
function latest(work) {
  let running = false;
  let again = false;
  return async function update() {
    if (running) return void (again = true);
    running = true;
    do {
      again = false;
      await work();
    } while (again);
    running = false;
  };
}

function padsIn(parent, labels, about, onChange) {
  return labels.map((label) => new Pad(parent, { size: about.size, label, onChange }));
}

async function latentsOf(images) {
  return images.length ? (await model.encode(images)).map(({ z }) => z) : [];
}

function showImages(grid, images, size) {
  grid.replaceChildren(
    ...images.map((pixels) => {
      const canvas = document.createElement("canvas");
      paint(canvas, pixels, size);
      return canvas;
    }),
  );
}

// (1) Examples of one symbol; sixteen more.
export function drawMore(root, about) {
  const dim = about.size ** 2;
  const [grid, number] = [root.querySelector(".samples"), root.querySelector(".number")];
  const pads = padsIn(root.querySelector(".pads"), ["Example 1", "Example 2", "Example 3"], about, () => update());
  const temperature = root.querySelector("input");
  let noise = model.uniform(2 * 16 * dim);
  const update = latest(async () => {
    root.ariaBusy = "true";
    const images = pads.map((pad) => pad.pixels).filter(Boolean);
    const encoded = images.length ? await model.encode(images) : [];
    const set = evidence.of(encoded.map(({ z }) => z), dim);
    showImages(grid, await model.sample(set, noise, Number(temperature.value)), about.size);
    number.textContent = await numberOf(encoded, dim);
    root.ariaBusy = "false";
  });
  root.querySelector(".again").onclick = () => {
    noise = model.uniform(2 * 16 * dim);
    update();
  };
  temperature.oninput = update;
  pads.forEach((pad, i) => {
    pad.set(Uint8Array.from(about.examples[4][i]));
    // The first stroke of the visitor replaces all of our examples.
    pad.onBegin = () => pads.forEach((other) => other.given && other.set(null));
  });
  return update();
}

async function numberOf(encoded, dim) {
  if (!encoded.length) return "Nothing drawn yet: these are new symbols, from the prior.";
  const last = encoded.at(-1);
  const others = evidence.of(encoded.slice(0, -1).map(({ z }) => z), dim);
  const { scores, logPrior } = await model.score([last.z], [others]);
  const logP = logPrior[0] + last.logDet;
  if (encoded.length === 1) return `log p of the drawing: ${nats(logP)}`;
  return `log p of the last drawing: ${nats(logP)}; given the others: ${nats(logP + scores[0][0])}`;
}

// (2) One example of each of two to five symbols; which of them is the next drawing?
export function tellApart(root, about) {
  const dim = about.size ** 2;
  const labels = ["A", "B", "C", "D", "E"];
  const pads = padsIn(root.querySelector(".pads"), labels, about, () => update());
  const [query] = padsIn(root.querySelector(".query"), ["The drawing to recognise"], about, () => update());
  const [bars, number] = [root.querySelector(".bars"), root.querySelector(".number")];
  const update = latest(async () => {
    root.ariaBusy = "true";
    const known = pads.map((pad, i) => [labels[i], pad.pixels]).filter(([, pixels]) => pixels);
    const names = [...known.map(([name]) => name), "None of these"];
    if (query.pixels && known.length) {
      const latents = await latentsOf([query.pixels, ...known.map(([, pixels]) => pixels)]);
      const sets = latents.slice(1).map((z) => evidence.of([z], dim));
      const scores = (await model.score(latents.slice(0, 1), sets)).scores[0];
      showBars(bars, names, evidence.probabilities(scores, about.none));
      number.textContent = `log p(drawing | symbol) − log p(drawing): ${known
        .map(([name], i) => `${name} ${nats(scores[i])}`)
        .join(", ")}`;
    } else {
      bars.replaceChildren();
      number.textContent = "Draw at least one symbol, and a drawing to recognise.";
    }
    root.ariaBusy = "false";
  });
  [1, 2, 3].forEach((character, i) => pads[i].set(Uint8Array.from(about.examples[character][0])));
  query.set(Uint8Array.from(about.examples[2][1]));
  return update();
}

function showBars(bars, names, values) {
  const highest = values.indexOf(Math.max(...values));
  bars.replaceChildren(
    ...names.map((name, i) => {
      const row = document.createElement("li");
      const percent = (100 * values[i]).toFixed(0);
      row.className = i === highest ? "highest" : "";
      row.innerHTML = `<span></span><meter max="100"></meter><b></b>`;
      row.querySelector("span").textContent = name;
      row.querySelector("meter").value = percent;
      row.querySelector("b").textContent = `${percent} %`;
      return row;
    }),
  );
}

// (3) A row of drawings; the one with the lowest score given the others is the odd one out.
export function oddOneOut(root, about) {
  const dim = about.size ** 2;
  const labels = [1, 2, 3, 4, 5, 6].map((i) => `Drawing ${i}`);
  const pads = padsIn(root.querySelector(".pads"), labels, about, () => update());
  const number = root.querySelector(".number");
  const update = latest(async () => {
    root.ariaBusy = "true";
    const drawn = pads.filter((pad) => pad.pixels);
    pads.forEach((pad) => pad.root.classList.remove("odd"));
    number.textContent = "Draw at least three.";
    if (drawn.length >= 3) {
      const latents = await latentsOf(drawn.map((pad) => pad.pixels));
      const all = evidence.of(latents, dim);
      const sets = latents.map((z) => evidence.remove(all, z));
      const { scores } = await model.score(latents, sets);
      const own = scores.map((row, i) => row[i]);
      const odd = drawn[own.indexOf(Math.min(...own))];
      odd.root.classList.add("odd");
      number.textContent = `score given the others: ${own.map((score) => nats(score)).join(", ")}`;
    }
    root.ariaBusy = "false";
  });
  pads.forEach((pad, i) => pad.set(Uint8Array.from(i === 3 ? about.examples[1][3] : about.examples[4][i])));
  return update();
}

// (4) A slider adds examples to the evidence and removes them; the predictive narrows and widens.
export async function forget(root, about) {
  const dim = about.size ** 2;
  const images = about.examples[3].map((pixels) => Uint8Array.from(pixels));
  const latents = await latentsOf(images);
  const noise = model.uniform(2 * 8 * dim);
  const slider = root.querySelector("input");
  slider.max = images.length - 1;
  showImages(root.querySelector(".seen"), images.slice(0, -1), about.size);
  const [prior] = await model.predict([evidence.empty(dim)], about.dimension);
  let set = evidence.empty(dim);
  const update = latest(async () => {
    root.ariaBusy = "true";
    const wanted = Number(slider.value);
    while (set.count < wanted) set = evidence.add(set, latents[set.count]);
    while (set.count > wanted) set = evidence.remove(set, latents[set.count - 1]);
    [...root.querySelector(".seen").children].forEach((canvas, i) => (canvas.className = i < wanted ? "" : "unseen"));
    const [now] = await model.predict([set], about.dimension);
    plot(root.querySelector(".plot"), prior, now, latents.slice(0, wanted).map((z) => z[about.dimension]));
    const { scores } = await model.score([latents.at(-1)], [set]);
    root.querySelector(".number").textContent =
      `${wanted} seen; spread of the most informative latent: ${now[1].toFixed(2)}; ` +
      `log p of another drawing rises by ${nats(scores[0][0])}`;
    showImages(root.querySelector(".samples"), await model.sample(set, noise, NEAT), about.size);
    root.ariaBusy = "false";
  });
  slider.oninput = update;
  return update();
}

function plot(svg, prior, now, seen) {
  const [width, height, count] = [400, 140, 200];
  const reach = 4 * prior[1];
  const grid = Array.from({ length: count }, (_, i) => prior[0] - reach + (2 * reach * (i + 0.5)) / count);
  const [before, after] = [prior, now].map((predictive) => evidence.densityOn(grid, ...predictive));
  const top = Math.max(...before, ...after);
  const x = (value) => ((value - grid[0]) / (grid.at(-1) - grid[0])) * width;
  const path = (density) =>
    density.map((p, i) => `${i ? "L" : "M"}${x(grid[i]).toFixed(1)} ${(height - 10 - (p / top) * (height - 20)).toFixed(1)}`);
  svg.innerHTML =
    `<path class="prior" d="${path(before).join("")}"/><path class="now" d="${path(after).join("")}"/>` +
    seen.map((value) => `<line x1="${x(value)}" x2="${x(value)}" y1="${height - 10}" y2="${height}"/>`).join("");
}
