// Starts the panels, and downloads the model meanwhile; tabs choose the panel that is shown.

import { apart } from "./apart.js";
import { forget } from "./forget.js";
import * as model from "./model.js";
import { more } from "./more.js";
import { odd } from "./odd.js";

const PANELS = { more, apart, odd, forget };
const updates = {}; // of the panels that were opened
const tabs = [...document.querySelectorAll("[role=tab]")];
const status = document.getElementById("loading");

function show(name) {
  for (const tab of tabs) {
    const isChosen = tab.dataset.panel === name;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    document.getElementById(tab.dataset.panel).hidden = !isChosen;
  }
  history.replaceState(null, "", `#${name}`);
  updates[name] ??= PANELS[name](document.getElementById(name), page);
}

for (const [i, tab] of tabs.entries()) {
  tab.onclick = () => show(tab.dataset.panel);
  tab.onkeydown = ({ key }) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const other = step && tabs.at((i + step) % tabs.length);
    other?.focus();
    other?.click();
  };
}

const megabytes = (files) => (files.reduce((bytes, file) => bytes + file.bytes, 0) / 1e6).toFixed(1);

async function use(name) {
  const files = Object.values(page.models[name].files);
  const [what, all] = page.model ? ["the model", files] : ["the model and its runtime", [page.runtime, ...files]];
  const [text, bar] = [status.querySelector("span"), status.querySelector("progress")];
  text.textContent = `Loading ${what} (${megabytes(all)} MB, once)`;
  bar.value = 0;
  status.hidden = false;
  await model.load(page, name, (fraction) => (bar.value = fraction));
  status.hidden = true;
  for (const update of Object.values(updates)) update();
}

function offerModels() {
  for (const [i, [name, { title, files }]] of Object.entries(page.models).entries()) {
    const label = document.createElement("label");
    label.innerHTML = `<input type="radio" name="model" /> <span></span>`;
    const choice = label.querySelector("input");
    Object.assign(choice, { value: name, checked: i === 0, onchange: () => use(name).catch(report) });
    label.querySelector("span").textContent = `${title} (${megabytes(Object.values(files))} MB)`;
    document.querySelector("fieldset").append(label);
  }
}

function report(error) {
  status.hidden = false;
  status.textContent = `The model does not run here: ${error?.message ?? error}`;
}
addEventListener("unhandledrejection", ({ reason }) => report(reason));

// Keeps the page itself for later visits without a network.
async function keepOffline() {
  await navigator.serviceWorker?.register("offline.js");
  await navigator.serviceWorker?.ready;
  document.getElementById("offline").hidden = !navigator.serviceWorker;
}

const page = await (await fetch("page.json")).json();
offerModels();
const asked = location.hash.slice(1);
show(asked in PANELS ? asked : "more");
use(Object.keys(page.models)[0])
  .then(keepOffline, report)
  .catch(() => undefined); // private windows have no service workers
