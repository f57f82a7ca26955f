// Loads the model with a progress bar, then starts the panels; tabs choose the one that is shown.

import { load } from "./model.js";
import { drawMore, forget, oddOneOut, tellApart } from "./panels.js";

const PANELS = { more: drawMore, apart: tellApart, odd: oddOneOut, forget };
const started = new Set();
let about;

async function show(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.panel === name;
    tab.setAttribute("aria-selected", chosen);
    document.getElementById(tab.dataset.panel).hidden = !chosen;
  }
  if (about && !started.has(name)) {
    started.add(name);
    await PANELS[name](document.getElementById(name), about);
  }
}

function chosen() {
  return document.querySelector("[role=tab][aria-selected=true]").dataset.panel;
}

for (const tab of document.querySelectorAll("[role=tab]")) tab.onclick = () => show(tab.dataset.panel).catch(report);

function report(error) {
  document.getElementById("loading").hidden = false;
  document.getElementById("loading").textContent = `The model could not be loaded: ${error.message}`;
}

try {
  const bar = document.querySelector("#loading progress");
  about = await load((fraction) => (bar.value = fraction));
  document.getElementById("loading").hidden = true;
  await show(chosen());
} catch (error) {
  report(error);
}
