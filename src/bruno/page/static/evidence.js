// The evidence of a set (count, mean, scatter of its latents), as bruno.Evidence: values, never changed in place.

export function empty(dim) {
  return { count: 0, mean: new Float64Array(dim), scatter: new Float64Array(dim) };
}

// Welford: M2 += (z − mean before)·(z − mean after).
export function add(set, z) {
  const count = set.count + 1;
  const mean = set.mean.map((m, i) => m + (z[i] - m) / count);
  const scatter = set.scatter.map((s, i) => s + (z[i] - set.mean[i]) * (z[i] - mean[i]));
  return { count, mean, scatter };
}

// The same, backwards: exact forgetting.
export function remove(set, z) {
  const count = set.count - 1;
  if (count === 0) return empty(z.length);
  const mean = set.mean.map((m, i) => m - (z[i] - m) / count);
  const scatter = set.scatter.map((s, i) => Math.max(0, s - (z[i] - mean[i]) * (z[i] - set.mean[i])));
  return { count, mean, scatter };
}

export function of(latents, dim) {
  return latents.reduce(add, empty(dim));
}

// Probabilities of the classes, and last of "none of these", whose score is that of the best of several others.
export function probabilities(scores, none) {
  const all = [...scores, none];
  const highest = Math.max(...all);
  const powers = all.map((s) => Math.exp(s - highest));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((p) => p / total);
}

// Logarithm of the Student-t density, relative to its highest value: −(ν + 1)/2 · log(1 + t²/ν).
export function logShape(x, location, scale, dof) {
  const t = (x - location) / scale;
  return (-(dof + 1) / 2) * Math.log1p((t * t) / dof);
}
