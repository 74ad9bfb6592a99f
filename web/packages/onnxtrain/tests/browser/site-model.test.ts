import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, python, runPython } from "../support.js";
import { DESK, PHONE, Site, until } from "./site.js";

let site: Site;
const file = (name: string) => join(site.folder, name);

beforeAll(async () => {
  site = await Site.open();
  const own = `${FIXTURES}/mlp-wasm`;
  const manifest = JSON.parse(readFileSync(`${own}/manifest.json`, "utf8")) as { checkpoint: string; models: { file: string }[] };
  mkdirSync(file("art"));
  for (const name of new Set(["manifest.json", manifest.checkpoint, ...manifest.models.map((m) => m.file)])) cpSync(`${own}/${name}`, join(file("art"), name));
  // The class is the index of the largest of the first four features.
  runPython(
    `
import json, sys, numpy as np
x = np.random.default_rng(0).standard_normal((400, 10)).astype(np.float32); labels = x[:, :4].argmax(1)
folder = sys.argv[1]
words = np.array(["ant", "bee", "cow", "dog"])[labels]
np.savez_compressed(folder + "/good.npz", x=x, labels=labels)
np.savez(folder + "/words.npz", x=x, labels=words)
np.savez(folder + "/short.npz", x=x[:, :9], labels=labels)
np.savez(folder + "/unnamed.npz", rows=x, labels=labels)
head = ",".join([f"x.{i}" for i in range(10)] + ["labels"])
rows = [",".join([*(f"{v:.5f}" for v in row), str(l)]) for row, l in zip(x, labels)]
def write(name, lines): open(folder + "/" + name, "w").write("\\n".join(lines))
write("good.csv", [head, *rows])
write("words.csv", [head, *(r.rsplit(",", 1)[0] + f',"{w}, the"' for r, w in zip(rows, words))])
write("good.jsonl", [json.dumps({"x": [round(float(v), 5) for v in row], "labels": str(w)}) for row, w in zip(x, words)])
write("ones.csv", [head, *(",".join([*(f"{v:.5f}" for v in row), str(l + 1)]) for row, l in zip(x, labels))])
write("first.txt", [str(labels.tolist().index(3))])
write("word.csv", [head, *rows[:2], rows[2].replace(rows[2].split(",")[3], "much")])
write("gap.csv", [head, *rows[:2], rows[2].replace(rows[2].split(",")[3], "")])
write("few.csv", [head.replace("x.9,", "")] + [",".join(r.split(",")[1:]) for r in rows])
write("half.csv", [head, *rows[:5], rows[5].rsplit(",", 1)[0] + ",0.5"])
write("bad.jsonl", ['{"x": [1, 2], "labels": 0}', '{"x": [1], "labels": 0}'])
import onnx, onnx.parser
def model(name, text): onnx.save(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17], producer_name: "a tool"> net ' + text), folder + "/" + name)
weights = ", ".join(f"{v:.4f}" for v in np.random.default_rng(2).normal(size=40) / 3)
layer = "<float[10,4] w = {" + weights + "}> { h = MatMul(x, w) "
model("my classifier.onnx", "(float[batch,10] x) => (float[batch,4] probabilities) " + layer + "probabilities = Softmax<axis = -1>(h) }")
model("two.onnx", "(float[batch,10] x) => (float[batch,4] score, float[batch,4] price) " + layer + "score = Sigmoid(h) price = Neg(h) }")
model("no weights.onnx", "(float[batch] x) => (float[batch] y) { y = Relu(x) }")
write("number.csv", ["width,height,area", *(f"{a:.3f},{b:.3f},{a * b + 0.001:.3f}" for a, b in np.random.default_rng(1).random((200, 2)))])
`,
    site.folder,
  );
});
afterAll(() => site?.close());

const state = (page: Page) => page.locator("#own-state");
const give = (page: Page, name: string) => page.setInputFiles("#own-data", file(name));
const accuracy = async (page: Page) => parseFloat(await page.locator("#accuracy").innerText());

async function train(page: Page, settings: Record<string, string> = {}): Promise<void> {
  if (!(await page.getByLabel("Epochs").isVisible())) await page.locator(".training summary").click();
  for (const [name, value] of Object.entries(settings)) await page.getByLabel(name).fill(value);
  await page.evaluate(() => (document.querySelector("#status")!.textContent = ""));
  await page.getByRole("button", { name: "Train my model" }).click();
}

test("trains an uploaded model on CSV, JSONL and NPZ, with text labels, and saves it", async () => {
  const { page, pageErrors, close } = await site.page("model/", DESK);
  await page.setInputFiles("#own-model", file("art"));
  await expect.poll(() => state(page).innerText()).toMatch(/the inputs x \(float32\[batch, 10\]\) and labels \(int64\[batch\]\)/);
  for (const [name, message] of [
    ["word.csv", /word.csv: column 'x.3', line 4: 'much' is not a number/],
    ["gap.csv", /gap.csv: column 'x.3', line 4 is empty/],
    ["few.csv", /few.csv: the model needs 'x' \(float32\[batch, 10\]\), which is 10 columns, got 9: x.0, x.1/],
    ["half.csv", /half.csv: column 'labels', line 7: 0.5 is not an integer, as 'labels' \(int64\[batch\]\) needs/],
    ["short.npz", /short.npz: the model needs 'x' \(float32\[batch, 10\]\), the array has shape \[400, 9\]/],
    ["unnamed.npz", /unnamed.npz: the model needs 'x' .*the file has rows, labels/],
    ["bad.jsonl", /bad.jsonl: line 2: 'x' is not a list of 2 numbers as in line 1/],
  ] as const) {
    await give(page, name);
    await expect.poll(() => state(page).innerText()).toMatch(message);
    expect(await page.getByRole("button", { name: "Train my model" }).isDisabled()).toBe(true);
  }
  for (const name of ["good.npz", "words.npz", "words.csv", "good.jsonl"]) {
    await give(page, name);
    await expect.poll(() => state(page).innerText()).toContain(`400 rows from ${name}`);
    if (name !== "good.npz") expect(await state(page).innerText()).toMatch(/'labels' is encoded as ant\S*( the)? = 0, bee/);
    await train(page, { "Learning rate": "0.02", Epochs: "10" });
    await until(page, "Done: 100 steps");
    expect(await accuracy(page)).toBeGreaterThan(75);
  }
  // Predictions on test rows are shown with the text labels.
  expect(await page.locator("#answer-rows td:nth-child(2)").first().innerText()).toMatch(/^(ant|bee|cow|dog)$/);
  await give(page, "ones.csv");
  await expect.poll(() => state(page).innerText()).toContain("400 rows from ones.csv");
  await train(page);
  await until(page, `Failed: ones.csv: 'labels' must be class indices in [0, 4), got 4 at row ${readFileSync(file("first.txt"), "utf8")}`);
  await give(page, "good.csv");
  await expect.poll(() => state(page).innerText()).toContain("400 rows from good.csv");
  await train(page, { "Learning rate": "0.02", Epochs: "10" });
  await until(page, "Done: 100 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 100");
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 100 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 200");
  expect(pageErrors).toEqual([]);
  await close();
});

test("builds an MLP for a table without a model, also on a phone", async () => {
  const { page, pageErrors, close } = await site.page("model/", PHONE);
  await page.getByRole("button", { name: "Use the iris dataset" }).tap();
  await expect.poll(() => state(page).innerText()).toMatch(/150 rows from iris.csv.*Classification of 'kind' from .*: setosa, versicolor, virginica/);
  await train(page);
  await until(page, "Done");
  expect(await accuracy(page)).toBeGreaterThan(85);
  expect(await page.locator("#answer-rows .right").count()).toBeGreaterThan(8);
  expect(await page.locator("#answer-rows td:nth-child(2)").first().innerText()).toMatch(/^(setosa|versicolor|virginica)$/);
  // Saved weights belong to one model.
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step");
  await page.getByLabel("Hidden layers").fill("8, none");
  await page.keyboard.press("Tab");
  await until(page, "Failed: Hidden layers must be sizes such as 64, 32, got 8, none");
  await page.getByLabel("Hidden layers").fill("8, 4");
  await page.keyboard.press("Tab");
  await until(page, "Ready.");
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Failed:");
  // Weights for another table are saved separately.
  await page.getByRole("button", { name: "Train my model" }).click();
  await until(page, "Done");
  // Regression: the page shows the test loss instead of the accuracy.
  await give(page, "number.csv");
  await expect.poll(() => state(page).innerText()).toContain("Regression of 'area'");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 0.");
  await train(page, { Epochs: "20" });
  await until(page, "Done");
  expect(await page.locator("#accuracy").innerText()).toMatch(/^loss 0\.0/);
  expect(pageErrors).toEqual([]);
  await close();
});

test("a plain .onnx file gives a command that builds it, and the result trains", async () => {
  const { page, pageErrors, close } = await site.page("model/", { ...DESK, acceptDownloads: true, permissions: ["clipboard-read", "clipboard-write"] });
  const onnx = (name: string) => page.setInputFiles("#own-onnx", file(name));
  await onnx("no weights.onnx");
  await expect.poll(() => state(page).innerText()).toBe("no weights.onnx: no float weights to train; export the model with its weights inside");
  await onnx("two.onnx");
  const command = page.locator("#command");
  await expect.poll(() => command.innerText()).toBe("onnxtrain build two.onnx --loss bce_with_logits --loss-output score --target web -o art/");
  await page.locator("#plain-output").selectOption("price");
  await page.locator("#plain-loss").selectOption("mse");
  expect(await command.innerText()).toBe("onnxtrain build two.onnx --loss mse --loss-output price --target web -o art/");
  await onnx("my classifier.onnx");
  await expect.poll(() => page.locator("#plain-note").innerText()).toBe("'probabilities' ends in Softmax: cross_entropy reads the logits before it.");
  expect(await page.locator("#plain-facts").innerText()).toMatch(/x: float32\[batch, 10\][^]*probabilities: float32\[batch, 4\][^]*40 in 1 tensor[^]*1 MatMul, 1 Softmax[^]*17, written by a tool/);
  await page.getByRole("button", { name: "Copy the command" }).click();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  expect(copied).toBe("onnxtrain build 'my classifier.onnx' --loss cross_entropy --metric accuracy --target web -o art/");
  execFileSync("bash", ["-c", copied.replace("onnxtrain", '"$PYTHON" -m onnxtrain').replace("art/", "built/")], { cwd: site.folder, env: { ...process.env, PYTHON: python() }, stdio: "pipe" });
  await page.setInputFiles("#own-model", file("built"));
  await give(page, "good.npz");
  await expect.poll(() => state(page).innerText()).toContain("400 rows from good.npz");
  expect(await page.locator("#plain").isVisible()).toBe(false);
  await train(page, { "Learning rate": "0.1", Epochs: "10" });
  await until(page, "Done: 100 steps");
  expect(await accuracy(page)).toBeGreaterThan(75);
  const [trained] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download .onnx" }).click()]);
  await trained.saveAs(file("trained.onnx"));
  // The file is the user's model: it still ends in Softmax.
  expect(runPython("import onnxruntime, sys, numpy as np; print(onnxruntime.InferenceSession(sys.argv[1]).run(None, {'x': np.ones((1, 10), 'f')})[0].sum())", file("trained.onnx")).trim()).toMatch(/^(1\.0|0\.99999|1\.00000)/);
  expect(pageErrors).toEqual([]);
  await close();
});
