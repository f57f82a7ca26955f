// The model, as asynchronous functions that run in the worker.

const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map();
let next = 0;

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

export const load = (onProgress) => call("load", {}, onProgress);
export const encode = (images) => call("encode", { images });
export const sample = (set, noise, temperature) => call("sample", { set, noise, temperature });
export const score = (latents, sets) => call("score", { latents, sets });
export const predict = (sets, dimension) => call("predict", { sets, dimension });

// Uniform on (0, 1): an exact 0 would make a sample infinite.
export function uniform(length, random = Math.random) {
  return Float32Array.from({ length }, () => Math.min(Math.max(random(), 2 ** -25), 1 - 2 ** -24));
}
