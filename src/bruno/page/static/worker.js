// Runs the models in a worker: downloads and inflates their files, then answers calls by name.

import * as ort from "./ort.wasm.bundle.min.mjs";

const CACHE = "bruno-models";
const loaded = {}; // sessions of each model, by function
let sessions; // of the model in use
let size; // of its images, in pixels

const calls = {
  use({ page, name }) {
    size = page.size;
    sessions = loaded[name];
  },

  // pixels of n drawings, dequantised -> their latents, and the log-det of each
  async encode({ images }) {
    const x = Float32Array.from(images.flatMap((image) => Array.from(image)));
    const { z, log_det } = await run("encode", { x: tensor(x, [images.length, 1, size, size]) });
    const dim = size * size;
    return images.map((_, i) => ({ z: z.data.slice(i * dim, (i + 1) * dim), logDet: log_det.data[i] }));
  },

  // n samples of the next element of a set, from given noise: uniform, (2, n, dim)
  async sample({ set, noise, temperature = 1 }) {
    const dim = size ** 2;
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
      z: tensor(z, [latents.length, size ** 2]),
      ...evidenceTensors(sets),
    });
    const rows = latents.map((_, i) =>
      Array.from(found.score.data.slice(i * sets.length, (i + 1) * sets.length)),
    );
    return { scores: rows, logPrior: Array.from(found.log_prior.data) };
  },

  // location, scale and degrees of freedom of some latent dimensions, for each set
  async predict({ sets, dimensions }) {
    const found = await run("predict", evidenceTensors(sets));
    return sets.map((_, i) =>
      dimensions.map((dimension) => {
        const at = i * size ** 2 + dimension;
        return [found.location.data[at], found.scale.data[at], found.dof.data[at]];
      }),
    );
  },
};

// Download a model, and the runtime before the first one.
async function prepare({ page, name }, onProgress) {
  if (loaded[name]) return;
  const { files } = page.models[name];
  const wanted = [...(ort.env.wasm.wasmBinary ? [] : [page.runtime]), ...Object.values(files)];
  const total = wanted.reduce((bytes, file) => bytes + file.bytes, 0);
  let done = 0;
  const graphs = Object.keys(files).filter((file) => file.endsWith(".onnx"));
  const progress = (bytes) => onProgress((0.7 * (done += bytes)) / total); // the rest is to start the graphs
  const parts = await Promise.all(wanted.map((file) => download(file, progress)));
  const contents = Object.fromEntries(wanted.map(({ address }, i) => [address, parts[i]]));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary ??= contents[page.runtime.address].buffer;
  const externalData = [{ path: page.weights, data: contents[files[page.weights].address] }];
  const made = {};
  for (const [i, file] of graphs.entries()) {
    onProgress(0.7 + (0.3 * i) / graphs.length);
    made[file.replace(".onnx", "")] = await ort.InferenceSession.create(contents[files[file].address], {
      executionProviders: ["wasm"],
      externalData,
      graphOptimizationLevel: "disabled", // would take longer than it saves
    });
  }
  loaded[name] = made;
  await forgetOthers(page);
}

// Remove the files of earlier versions from the cache.
async function forgetOthers({ runtime, models }) {
  const files = [runtime, ...Object.values(models).flatMap((model) => Object.values(model.files))];
  const wanted = new Set(files.map(({ address }) => new URL(address, self.location).href));
  const cache = await self.caches?.open(CACHE).catch(() => undefined);
  for (const request of (await cache?.keys()) ?? []) if (!wanted.has(request.url)) await cache.delete(request);
}

// A gzipped file, inflated. It is kept in the browser's cache under an address that names its contents.
async function download({ address, bytes }, progress) {
  const cache = await self.caches?.open(CACHE).catch(() => undefined);
  const kept = await cache?.match(address);
  const response = kept ?? (await fetch(address));
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  const chunks = [];
  let received = 0;
  for await (const chunk of read(response.body)) {
    chunks.push(chunk);
    received += chunk.length;
    progress(Math.min(received, bytes) - Math.min(received - chunk.length, bytes));
  }
  const blob = new Blob(chunks);
  // A full disk or a private window must not stop the page.
  if (!kept) await cache?.put(address, new Response(blob)).catch(() => undefined);
  const isGzipped = chunks[0]?.[0] === 0x1f && chunks[0]?.[1] === 0x8b; // some hosts inflate .gz themselves
  const stream = isGzipped ? blob.stream().pipeThrough(new DecompressionStream("gzip")) : blob.stream();
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Safari's streams cannot be iterated.
async function* read(stream) {
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

function tensor(data, dims) {
  const type = { Float32Array: "float32", Float64Array: "float64", BigInt64Array: "int64" };
  return new ort.Tensor(type[data.constructor.name], data, dims);
}

function evidenceTensors(sets) {
  const dim = size ** 2;
  const joined = (field) => {
    const all = new Float64Array(sets.length * dim);
    sets.forEach((set, i) => all.set(set[field], i * dim));
    return tensor(all, [sets.length, dim]);
  };
  const count = BigInt64Array.from(sets, (set) => BigInt(set.count));
  return { count: tensor(count, [sets.length]), mean: joined("mean"), scatter: joined("scatter") };
}

const run = (name, inputs) => sessions[name].run(inputs);

async function answer(id, work) {
  try {
    self.postMessage({ id, result: await work() });
  } catch (error) {
    self.postMessage({ id, error: String(error?.message ?? error) });
  }
}

// One call at a time, in order: a session cannot run twice at once. Only downloads run beside the others.
let last = Promise.resolve();
self.onmessage = ({ data: { id, name, options } }) => {
  if (name === "prepare") answer(id, () => prepare(options, (fraction) => self.postMessage({ id, progress: fraction })));
  else last = last.then(() => answer(id, () => calls[name](options)));
};
