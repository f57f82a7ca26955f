// Runs the model in a worker: downloads and inflates its files, then answers calls by name.

import * as ort from "./ort.wasm.bundle.min.mjs";

let about;
const sessions = {};

const calls = {
  load,

  // pixels of n drawings, integers -> their latents, and the log-det of each
  async encode({ images }) {
    const { size } = about;
    const x = Float32Array.from(images.flatMap((image) => Array.from(image)), (value) => value + 0.5);
    const { z, log_det } = await run("encode", { x: tensor(x, [images.length, 1, size, size]) });
    const dim = size * size;
    return images.map((_, i) => ({ z: z.data.slice(i * dim, (i + 1) * dim), logDet: log_det.data[i] }));
  },

  // n samples of the next element of a set, from given noise: uniform, (2, n, dim)
  async sample({ set, noise, temperature = 1 }) {
    const dim = about.size ** 2;
    const n = noise.length / (2 * dim);
    const { z } = await run("sample_latents", {
      ...evidenceTensors([set]),
      noise: tensor(noise, [2, n, 1, dim]),
      temperature: tensor(Float32Array.of(temperature), []),
    });
    const { x } = await run("decode", { z: tensor(z.data, [n, dim]) });
    const pixels = Uint8Array.from(x.data, (value) => Math.floor(value));
    return Array.from({ length: n }, (_, i) => pixels.slice(i * dim, (i + 1) * dim));
  },

  // scores of latents for each set, and their log-density given no set
  async score({ latents, sets }) {
    const z = Float32Array.from(latents.flatMap((latent) => Array.from(latent)));
    const found = await run("score_latents", {
      z: tensor(z, [latents.length, about.size ** 2]),
      ...evidenceTensors(sets),
    });
    const rows = latents.map((_, i) =>
      Array.from(found.score.data.slice(i * sets.length, (i + 1) * sets.length)),
    );
    return { scores: rows, logPrior: Array.from(found.log_prior.data) };
  },

  // location, scale and degrees of freedom of one latent dimension, for each set
  async predict({ sets, dimension }) {
    const found = await run("predict", evidenceTensors(sets));
    const dim = about.size ** 2;
    return sets.map((_, i) => {
      const at = i * dim + dimension;
      return [found.location.data[at], found.scale.data[at], found.dof.data[at]];
    });
  },
};

async function load({ onProgress }) {
  about = await (await fetch("page.json")).json();
  const names = Object.keys(about.files);
  const total = Object.values(about.files).reduce((a, b) => a + b);
  let done = 0;
  const progress = (bytes) => onProgress((done += bytes) / total);
  const parts = await Promise.all(names.map((name) => download(name, progress)));
  const files = Object.fromEntries(names.map((name, i) => [name.replace(/\.gz$/, ""), parts[i]]));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = files["runtime.wasm"].buffer;
  for (const name of about.functions) {
    sessions[name] = await ort.InferenceSession.create(files[`${name}.onnx`], {
      executionProviders: ["wasm"],
      externalData: [{ path: about.weights, data: files[about.weights] }],
      graphOptimizationLevel: "disabled", // would take longer than it saves
    });
  }
  return about;
}

// A gzipped file, inflated; kept in the browser's cache under the fingerprint of the model.
async function download(name, progress) {
  const cache = await self.caches?.open(`bruno-${about.fingerprint}`).catch(() => undefined);
  let response = await cache?.match(name);
  if (!response) {
    response = await fetch(name);
    if (!response.ok) throw new Error(`${name}: ${response.status}`);
    await cache?.put(name, response.clone()).catch(() => undefined);
  }
  const counted = new TransformStream({
    transform(chunk, controller) {
      progress(chunk.length);
      controller.enqueue(chunk);
    },
  });
  const stream = response.body.pipeThrough(counted).pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function tensor(data, dims) {
  const type = { Float32Array: "float32", Float64Array: "float64", BigInt64Array: "int64" };
  return new ort.Tensor(type[data.constructor.name], data, dims);
}

function evidenceTensors(sets) {
  const dim = about.size ** 2;
  const joined = (field) => {
    const all = new Float64Array(sets.length * dim);
    sets.forEach((set, i) => all.set(set[field], i * dim));
    return tensor(all, [sets.length, dim]);
  };
  const count = BigInt64Array.from(sets, (set) => BigInt(set.count));
  return { count: tensor(count, [sets.length]), mean: joined("mean"), scatter: joined("scatter") };
}

const run = (name, inputs) => sessions[name].run(inputs);

// One call at a time, in order: a session cannot run twice at once.
let last = Promise.resolve();
self.onmessage = ({ data: { id, name, options } }) => {
  last = last.then(async () => {
    try {
      const onProgress = (fraction) => self.postMessage({ id, progress: fraction });
      self.postMessage({ id, result: await calls[name]({ ...options, onProgress }) });
    } catch (error) {
      self.postMessage({ id, error: String(error?.message ?? error) });
    }
  });
};
