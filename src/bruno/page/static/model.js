// The model, as asynchronous functions that run in the worker. Calls before it is loaded wait for it.

const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map();
let next = 0;
let firstIsLoaded;
const loaded = new Promise((resolve) => (firstIsLoaded = resolve));
let encoded = withoutLatents(); // by the model in use

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
  encoded = withoutLatents();
  firstIsLoaded();
}

// Latents and log-det of each drawing; those of known drawings are not computed again. Drawings are dequantised
// with ½ to tell them apart, and with noise, as in training, to draw samples: they have fewer specks.
export async function encode(images, { noisy = false } = {}) {
  const known = noisy ? encoded.noisy : encoded.plain;
  const missing = images.filter((image) => !known.has(image));
  const dequantised = missing.map((image) => Float32Array.from(image, (level) => level + (noisy ? noise() : 0.5)));
  const found = missing.length ? await run("encode", { images: dequantised }) : [];
  missing.forEach((image, i) => known.set(image, found[i]));
  return images.map((image) => known.get(image));
}

export const sample = (set, noise, temperature) => run("sample", { set, noise, temperature });
export const score = (latents, sets) => run("score", { latents, sets });
export const predict = (sets, dimensions) => run("predict", { sets, dimensions });

function withoutLatents() {
  return { plain: new WeakMap(), noisy: new WeakMap() };
}

// Uniform on [0, 1), in steps that float32 has up to 256: rounding never reaches the next level.
function noise() {
  return Math.floor(Math.random() * 2 ** 16) / 2 ** 16;
}

// Uniform on (0, 1): an exact 0 would make a sample infinite.
export function uniform(length, random = Math.random) {
  return Float32Array.from({ length }, () => Math.min(Math.max(random(), 2 ** -25), 1 - 2 ** -24));
}
