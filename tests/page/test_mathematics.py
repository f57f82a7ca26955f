"""What runs in the browser gives the same numbers as Python, on the same drawings and random numbers."""

import numpy as np
import pytest
import torch
from PIL import Image
from visitor import ZIGZAG, draw, open_panel, updated

import bruno
from bruno import Evidence
from bruno.data.drawings import normalise_drawing
from bruno.data.synthetic import draw_characters
from bruno.onnx.functions import given_noise
from bruno.process import StudentT

pytestmark = pytest.mark.slow
DRAWN = draw_characters(2, 3, seed=3).elements.flatten(1)
STROKES = {
    "small": [[[0.4, 0.4], [0.5, 0.6], [0.6, 0.4]]],
    "large, at the edge": [[[0.02, 0.05], [0.95, 0.9]], [[0.9, 0.1], [0.1, 0.95]]],
    "off centre": [[[0.05, 0.1], [0.05, 0.5], [0.3, 0.5]]],
}

# The drawings that were encoded, and the noise and temperature of the last samples.
RECORD = """() => {
    const isPatched = window.asked !== undefined;
    window.asked = { images: [] };
    if (isPatched) return;
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function (message) {
        const { images = [], noise, temperature } = message.options;
        asked.images.push(...images.map((image) => Array.from(image)));
        if (noise) Object.assign(asked, { noise: Array.from(noise), temperature });
        return post.call(this, message);
    };
}"""


@pytest.fixture(scope="module")
def model():
    return bruno.pretrained("omniglot-small")


def use(page, name):
    page.check(f"input[value={name}]")
    page.wait_for_selector("#loading", state="hidden")
    page.wait_for_selector("#more[aria-busy=false]")


def in_browser(page, body, *arguments):
    """The result of JavaScript with the modules of the page; `plain` turns typed arrays into lists."""
    modules = "const [model, evidence, drawing] = await Promise.all(['model', 'evidence', 'drawing'].map("
    modules += "(name) => import(`./${name}.js`)));"
    lists = "const plain = (x) => ArrayBuffer.isView(x) || Array.isArray(x) ? Array.from(x, plain) : x;"
    return page.evaluate(f"async (given) => {{ {modules} {lists} {body} }}", list(arguments))


def assert_close(found, expected, tolerance=1e-4):
    assert np.allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["omniglot-small", pytest.param("omniglot", marks=pytest.mark.long)])
def test_latents_scores_and_predictives_match_python(desktop, name):
    body = """
        const encoded = await model.encode(given[0]);
        const latents = encoded.map(({ z }) => z);
        const sets = [evidence.empty(784), evidence.of(latents.slice(0, 3), 784)];
        const { scores, logPrior } = await model.score(latents, sets);
        const predictives = await model.predict(sets, [7, 9]);
        return [latents, encoded.map(({ logDet }) => logDet), scores, logPrior, predictives].map(plain);"""
    model = bruno.pretrained(name)
    use(desktop, name)
    z, log_det, scores, log_prior, predictives = in_browser(desktop, body, DRAWN.tolist())
    use(desktop, "omniglot-small")
    encoded = model.encode(DRAWN.view(-1, 1, 28, 28))
    assert_close(z, encoded.z)
    assert_close(log_det, encoded.log_det)
    sets = Evidence.stack([Evidence.empty(784), Evidence.of(encoded.z[:3])])
    prior = model.process.log_prob(encoded.z)
    assert_close(scores, model.process.log_prob(encoded.z.unsqueeze(1), sets) - prior.unsqueeze(1))
    assert_close(log_prior, prior)
    predictive = model.process.predictive(sets)
    assert_close(predictives, torch.stack([predictive.loc, predictive.scale, predictive.df], -1)[:, [7, 9]])


def test_drawings_are_dequantised_with_noise_once(desktop):
    body = """
        const images = given[0].map((image) => Uint8Array.from(image));
        await model.encode(images, { noisy: true });
        const noisy = asked.images.slice();
        const [again] = await model.encode([images[0]], { noisy: true });
        const [without] = await model.encode([images[0]]);
        return [noisy, again.z, without.z, asked.images.length].map(plain);"""
    use(desktop, "omniglot-small")
    desktop.evaluate(RECORD)
    drawn = DRAWN[:2].clone()
    drawn[0, :2] = 255
    noisy, again, without, encoded = in_browser(desktop, body, drawn.tolist())
    assert encoded == 3  # the noise of a drawing stays the same
    noisy = torch.tensor(noisy)
    assert torch.equal(noisy.floor(), drawn.float())
    assert 0.45 < (noisy - noisy.floor()).mean() < 0.55
    assert (noisy - noisy.floor()).std() > 0.25
    model = bruno.pretrained("omniglot-small")
    assert_close(again, model.encode(noisy.view(2, 1, 28, 28)).z[0])
    assert_close(without, model.encode(drawn[:1].view(1, 1, 28, 28)).z[0])


def test_samples_match_python_for_the_same_drawings_and_noise(desktop, model):
    """What is shown after two drawings by mouse; what the page asks of its worker is recorded."""
    section = open_panel(desktop, "more")
    desktop.evaluate(RECORD)
    for i, points in enumerate((ZIGZAG, [(x + 0.03, y) for x, y in ZIGZAG])):
        pad = section.locator(".pad canvas").nth(i)
        updated(desktop, "more", lambda pad=pad, points=points: draw(desktop, pad, points))
    shown = "(all) => all.map((one) => Array.from(one.pixels))"
    found = torch.tensor(section.locator(".samples canvas").evaluate_all(shown))
    images, noise, temperature = desktop.evaluate("[asked.images, asked.noise, asked.temperature]")
    assert len(images) == 2
    posterior = model.condition(torch.tensor(images).view(1, 2, 1, 28, 28))
    with given_noise(torch.tensor(noise).view(2, 16, 1, 784)):
        samples = posterior.sample(16, temperature=temperature).images
    levels = (found - samples.view(16, 784).long()).abs()
    assert (levels <= 1).float().mean() >= 0.99


def test_evidence_is_added_and_removed_as_in_python(desktop):
    z = torch.randn(4, 5, dtype=torch.double)
    body = """
        const all = evidence.of(given[0], 5);
        const rest = evidence.remove(evidence.remove(all, given[0][3]), given[0][0]);
        const none = given[0].reduce(evidence.remove, all);
        return [all, rest, none].map(({ count, mean, scatter }) => [count, plain(mean), plain(scatter)]);"""
    everything, rest, none = in_browser(desktop, body, z.tolist())
    for found, expected in ((everything, Evidence.of(z)), (rest, Evidence.of(z[1:3]))):
        assert found[0] == expected.count
        assert_close(found[1], expected.mean, 1e-12)
        assert_close(found[2], expected.scatter, 1e-12)
    assert none == [0, [0] * 5, [0] * 5]


def test_densities_and_probabilities_match_python(desktop):
    grid = torch.linspace(-40, 40, 101, dtype=torch.double)
    body = """
        const shape = given[0].map((x) => evidence.logShape(x, 0.5, 1.5, 7));
        return [shape, evidence.probabilities([3, 1], 2)].map(plain);"""
    shape, probabilities = in_browser(desktop, body, grid.tolist())
    density = StudentT(7.0, 0.5, 1.5)
    assert_close(shape, density.log_prob(grid) - density.log_prob(torch.tensor(0.5)))
    assert_close(probabilities, torch.tensor([3.0, 1, 2]).softmax(0))


@pytest.mark.parametrize("name", STROKES)
def test_strokes_are_normalised_as_images_are_in_python(desktop, name):
    body = """
        const frame = given[0].map((stroke) => stroke.map((point) => point.map((x) => x * drawing.SIDE)));
        const mask = drawing.rasterised(drawing.framed(given[0]));
        return [drawing.rasterised(frame), mask, drawing.pixelsOf(given[0], 28)].map(plain);"""
    raw, mask, pixels = (np.array(x, np.uint8) for x in in_browser(desktop, body, STROKES[name]))
    reduced = Image.fromarray(mask.reshape(105, 105)).resize((28, 28), Image.Resampling.BILINEAR)
    assert np.abs(np.asarray(reduced).ravel().astype(int) - pixels).max() <= 1
    expected = normalise_drawing(raw.reshape(105, 105), invert=False).astype(int).ravel()
    # Images are thinned to centre lines, which are shorter than the strokes at both ends.
    assert np.abs(expected - pixels).sum() < 0.3 * expected.sum()
