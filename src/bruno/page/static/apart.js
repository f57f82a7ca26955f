// One example of each of two to five symbols; which of them is the next drawing?

import { latentsOf, latest, nats, padsIn } from "./common.js";
import * as evidence from "./evidence.js";
import * as model from "./model.js";

const LABELS = ["A", "B", "C", "D", "E"];

export function apart(root, page) {
  const dim = page.size ** 2;
  const number = root.querySelector(".number");
  const parent = root.querySelector(".pads");
  const pads = padsIn(parent, LABELS.map((name) => `Symbol ${name}`), { size: page.size, hint: "Add a symbol" }, () => update());
  const drawHere = { size: page.size, hint: "Draw one of them here" };
  const [query] = padsIn(root.querySelector(".query"), ["The drawing to recognise"], drawHere, () => update());
  const none = document.createElement("figure");
  none.className = "pad none";
  none.innerHTML = `<div class="paper">None of these</div><figcaption></figcaption>`;
  parent.append(none);
  const tiles = [...pads.map((pad) => pad.root), none];

  const update = latest(root, async () => {
    const known = pads.filter((pad) => pad.pixels);
    const isReady = query.pixels && known.length;
    if (isReady) {
      const [drawn, ...latents] = await latentsOf([query, ...known].map((pad) => pad.pixels));
      const sets = latents.map((z) => evidence.of([z], dim));
      const scores = (await model.score([drawn], sets)).scores[0];
      showBars(tiles, [...known.map((pad) => pad.root), none], evidence.probabilities(scores, page.models[page.model].none));
      const named = scores.map((score, i) => `${LABELS[pads.indexOf(known[i])]} ${nats(score)}`);
      number.textContent = `log p(drawing | symbol) − log p(drawing): ${named.join(", ")}.`;
    } else {
      showBars(tiles, [], []);
      number.textContent = query.pixels ? "Teach it at least one symbol." : "Draw one of the symbols.";
    }
  });
  [1, 2, 3].forEach((symbol, i) => pads[i].set(page.symbols[symbol][0]));
  query.set(page.symbols[2][4]);
  update();
  return update;
}

// A bar below each tile that takes part; the highest one is marked.
function showBars(tiles, taking, values) {
  const highest = taking[values.indexOf(Math.max(...values))];
  for (const tile of tiles) {
    const at = taking.indexOf(tile);
    tile.classList.toggle("highest", tile === highest && at >= 0);
    const caption = tile.querySelector("figcaption");
    caption.innerHTML = at < 0 ? "" : `<meter max="100"></meter><b></b>`;
    if (at < 0) continue;
    const percent = (100 * values[at]).toFixed(0);
    caption.querySelector("meter").value = percent;
    caption.querySelector("b").textContent = `${percent} %`;
  }
}
