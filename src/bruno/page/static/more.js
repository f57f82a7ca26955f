// Examples of one symbol; sixteen more of it.

import { latest, nats, padsIn, symbolsInTurn, isCalm } from "./common.js";
import * as evidence from "./evidence.js";
import { showImages } from "./ink.js";
import * as model from "./model.js";

const SAMPLES = 16;

export function more(root, page) {
  const dim = page.size ** 2;
  const [grid, number, temperature] = [".samples", ".number", "input"].map((name) => root.querySelector(name));
  const labels = ["Example 1", "Example 2", "Example 3"];
  const pads = padsIn(root.querySelector(".pads"), labels, { size: page.size, hint: "Draw here" }, () => update());
  const nextSymbol = symbolsInTurn(page);
  let noise = model.uniform(2 * SAMPLES * dim);
  showImages(grid, Array(SAMPLES).fill(new Uint8Array(dim)), page.size);

  const update = latest(root, async () => {
    const images = pads.map((pad) => pad.pixels).filter(Boolean);
    const encoded = await model.encode(images, { noisy: true });
    const set = evidence.of(encoded.map(({ z }) => z), dim);
    showImages(grid, await model.sample(set, noise, Number(temperature.value)), page.size);
    number.textContent = await numberOf(encoded, dim);
  });
  const show = () => {
    const drawings = nextSymbol();
    pads.forEach((pad, i) => (isCalm() ? pad.set(drawings[i]) : pad.trace(drawings[i])));
    return update();
  };
  // The first stroke of the visitor replaces all of our examples.
  pads.forEach((pad) => (pad.onBegin = () => pads.forEach((other) => other !== pad && other.isExample && other.set(null))));
  root.querySelector(".other").onclick = show;
  root.querySelector(".again").onclick = () => {
    noise = model.uniform(2 * SAMPLES * dim);
    update();
  };
  temperature.oninput = update;
  show();
  return update;
}

async function numberOf(encoded, dim) {
  if (!encoded.length) return "Nothing drawn yet: these are symbols that the model makes up.";
  const last = encoded.at(-1);
  const others = evidence.of(encoded.slice(0, -1).map(({ z }) => z), dim);
  const { scores, logPrior } = await model.score([last.z], [others]);
  const logP = logPrior[0] + last.logDet;
  if (encoded.length === 1) return `log p(drawing) = ${nats(logP)}`;
  return `Last drawing: log p = ${nats(logP)}; given the others, ${nats(logP + scores[0][0])}.`;
}
