// The model, as asynchronous functions that run in the worker. Calls before it is loaded wait for it.

const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map();
let next = 0;
let firstIsLoaded;
const loaded = new Promise((resolve) => (firstIsLoaded = resolve));
let encoded = new WeakMap(); // latents of drawings, by the model in use

worker.onmessage = ({ data: { id, result, error, progress } }) => {
  const { resolve, reject, onProgress } = waiting.get(id);
  if (progress !== undefined) return onProgress?.(progress);
  waiting.delete(id);
  error === undefined ? resolve(result) : reject(new Error(error));
};
worker.onerror = ({ message }) => waiting.forEach(({ reject }) => reject(new Error(message)));

function call(name, options = {}, onProgress) {
  return new Promise((resolve, reject) => {
    waiting.set(next, { resolve, reject, onProgress });
    worker.postMessage({ id: next++, name, options });
  });
}

async function run(name, options) {
  await loaded;
  return call(name, options);
}

// Use a model of the page, after its download.
export async function load(page, name, onProgress) {
  await call("prepare", { page, name }, onProgress);
  await call("use", { page, name });
  page.model = name;
  encoded = new WeakMap();
  firstIsLoaded();
}

// Latents and log-det of each drawing; those of known drawings are not computed again.
export async function encode(images) {
  const known = encoded;
  const missing = images.filter((image) => !known.has(image));
  const found = missing.length ? await run("encode", { images: missing }) : [];
  missing.forEach((image, i) => known.set(image, found[i]));
  return images.map((image) => known.get(image));
}

export const sample = (set, noise, temperature) => run("sample", { set, noise, temperature });
export const score = (latents, sets) => run("score", { latents, sets });
export const predict = (sets, dimensions) => run("predict", { sets, dimensions });

// Uniform on (0, 1): an exact 0 would make a sample infinite.
export function uniform(length, random = Math.random) {
  return Float32Array.from({ length }, () => Math.min(Math.max(random(), 2 ** -25), 1 - 2 ** -24));
}
