// Strokes redrawn as Omniglot's drawings: one frame, one pen, one filter; as bruno.data.drawings does for images.

export const SIDE = 105;
const EXTENTS = [50, 88]; // longer side of the ink
const CENTRES = [41, 60]; // centre of the ink along both axes
const PEN = 5; // squared radius of the pen
const REACH = Math.floor(Math.sqrt(PEN));

const clip = (x, [low, high]) => Math.min(Math.max(x, low), high);

// Points of strokes, in units of the pad (0 to 1), as pixels of the frame of 105 × 105.
export function framed(strokes) {
  const points = strokes.flat();
  const ends = [0, 1].map((axis) => {
    const values = points.map((point) => Math.round(point[axis] * SIDE));
    return [Math.min(...values) - REACH, Math.max(...values) + REACH + 1]; // of the ink
  });
  const extent = Math.max(...ends.map(([low, high]) => high - low));
  const scale = clip(extent, EXTENTS) / extent;
  const moves = ends.map(([low, high]) => {
    const centre = (low + high) / 2;
    const position = clip((centre - SIDE / 2) * scale + SIDE / 2, CENTRES);
    return (x) => (x + 0.5 - centre) * scale + position - 0.5; // the centre of a pixel is at ½
  });
  return strokes.map((stroke) => stroke.map((point) => point.map((x, axis) => moves[axis](x * SIDE))));
}

// A mask of 105 × 105 with the strokes drawn by the pen, a disc.
export function rasterised(strokes) {
  const mask = new Uint8Array(SIDE * SIDE);
  const dot = (x, y) => {
    for (let down = -REACH; down <= REACH; down++)
      for (let right = -REACH; right <= REACH; right++) {
        const [row, column] = [Math.round(y) + down, Math.round(x) + right];
        const inside = row >= 0 && row < SIDE && column >= 0 && column < SIDE;
        if (inside && down * down + right * right <= PEN) mask[row * SIDE + column] = 255;
      }
  };
  for (const stroke of strokes) {
    dot(...stroke[0]);
    for (let i = 1; i < stroke.length; i++) {
      const [[x0, y0], [x1, y1]] = [stroke[i - 1], stroke[i]];
      const steps = Math.max(1, Math.ceil(2 * Math.hypot(x1 - x0, y1 - y0)));
      for (let k = 1; k <= steps; k++) dot(x0 + ((x1 - x0) * k) / steps, y0 + ((y1 - y0) * k) / steps);
    }
  }
  return mask;
}

// Pillow's bilinear filter, a triangle as wide as the reduction, along one axis of a square; transposes.
function reducedAlongRows(image, from, to, rows) {
  const scale = from / to;
  const out = new Uint8Array(to * rows);
  for (let i = 0; i < to; i++) {
    const centre = (i + 0.5) * scale;
    const first = Math.max(0, Math.floor(centre - scale + 0.5));
    const last = Math.min(from, Math.floor(centre + scale + 0.5));
    const weights = [];
    for (let j = first; j < last; j++) weights.push(Math.max(0, 1 - Math.abs((j - centre + 0.5) / scale)));
    const total = weights.reduce((a, b) => a + b);
    for (let row = 0; row < rows; row++) {
      const sum = weights.reduce((s, w, k) => s + w * image[row * from + first + k], 0);
      out[i * rows + row] = Math.round(sum / total);
    }
  }
  return out;
}

export function reduced(image, from, to) {
  return reducedAlongRows(reducedAlongRows(image, from, to, from), from, to, to);
}

// The pixels of a drawing as the model takes them; null if nothing is drawn.
export function pixelsOf(strokes, size) {
  return strokes.length ? reduced(rasterised(framed(strokes)), SIDE, size) : null;
}
