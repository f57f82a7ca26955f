// A row of drawings; the one with the lowest score given the others is the odd one out.

import { latentsOf, latest, nats, padsIn, symbolsInTurn } from "./common.js";
import * as evidence from "./evidence.js";
import * as model from "./model.js";

const LENGTH = 6;

export function odd(root, page) {
  const dim = page.size ** 2;
  const labels = Array.from({ length: LENGTH }, (_, i) => `Drawing ${i + 1}`);
  const pads = padsIn(root.querySelector(".pads"), labels, { size: page.size, hint: "Draw here" }, () => update());
  const number = root.querySelector(".number");
  const nextSymbol = symbolsInTurn(page, 4);

  const update = latest(root, async () => {
    const drawn = pads.filter((pad) => pad.pixels);
    const scores = drawn.length < 3 ? [] : await scoresGivenOthers(drawn.map((pad) => pad.pixels), dim);
    const lowest = Math.min(...scores);
    pads.forEach((pad) => {
      const score = scores[drawn.indexOf(pad)];
      // Below 0, the others make the drawing less likely, not more.
      pad.root.classList.toggle("odd", score === lowest && score < 0);
      pad.caption.textContent = score === undefined ? "" : nats(score);
    });
    const verdict = lowest < 0 ? "Below 0: the others make it less likely." : "All above 0: these go together.";
    number.textContent = scores.length
      ? `Below each drawing: log p(drawing | the others) − log p(drawing). ${verdict}`
      : "Draw at least three.";
  });
  const show = () => {
    const [many, one] = [nextSymbol(), nextSymbol()];
    const place = Math.floor(Math.random() * LENGTH);
    pads.forEach((pad, i) => pad.set(i === place ? one[i] : many[i]));
    return update();
  };
  root.querySelector(".other").onclick = show;
  root.querySelector(".blank").onclick = () => {
    pads.forEach((pad) => pad.set(null));
    update();
  };
  show();
  return update;
}

// Each drawing's score, given all the others: the evidence of all of them, less its own.
async function scoresGivenOthers(images, dim) {
  const latents = await latentsOf(images);
  const all = evidence.of(latents, dim);
  const { scores } = await model.score(latents, latents.map((z) => evidence.remove(all, z)));
  return scores.map((row, i) => row[i]);
}
