import { Artifacts, checkLabels, Trainer, type Dataset, type TensorSpec } from "onnxtrain";
import { columnsFor, rowsOf, shuffled, type Columns } from "./columns.js";
import { readTable } from "./table.js";
import { $, attempt, say, show } from "./ui.js";

/** A person's own model and numbers. */
export interface Own {
  open(): Promise<Trainer>;
  readonly train: Dataset;
  readonly test: Dataset;
  readonly rows: number;
  /** Under which its checkpoints are kept: other models have other names. */
  readonly name: string;
  /** Gives the error of a run in words about the file: the rows of a run are in another order. */
  explain(error: Error): Error;
}

let artifacts: Artifacts | undefined;
let table: Columns | undefined;
let fileName = "";

const inputsOf = (of: Artifacts): TensorSpec[] => {
  const { models } = of.manifest;
  const spec = models.find((m) => m.role === "step" && m.steps_per_call === 1) ?? models.find((m) => m.role === "train")!;
  return spec.inputs.filter((t) => t.role === "input" || t.role === "target");
};

/** Gives a short name for a text, the same for the same text (FNV-1a). */
function fingerprint(words: string): string {
  let hash = 0x811c9dc5;
  for (let i = 0; i < words.length; i++) hash = Math.imul(hash ^ words.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16);
}

/** Gives what was dropped, if there is a model and numbers for it. */
export function ownRun(device: () => "wasm" | "webgpu"): Own | undefined {
  if (!artifacts || !table) return undefined;
  const [opened, asRead, file] = [artifacts, table, fileName];
  const mixed = shuffled(table);
  const count = Object.values(mixed)[0]!.dims[0]!;
  const kept = count - Math.max(1, Math.floor(count / 5));
  return {
    open: () => Trainer.create({ artifacts: opened, device: device(), onMessage: say }),
    train: rowsOf(mixed, 0, kept),
    test: rowsOf(mixed, kept, count),
    rows: kept,
    name: `own-${fingerprint(opened.text)}`,
    explain: (error) => {
      try {
        if (error.name === "ShapeError") checkLabels(opened.manifest, asRead);
        return error;
      } catch (better) {
        return new Error(`${file}: ${(better as Error).message}`);
      }
    },
  };
}

async function takeModel(files: readonly File[]): Promise<void> {
  table = undefined;
  artifacts = await Artifacts.load(files);
  const inputs = inputsOf(artifacts).map((t) => `${t.name} (${t.dtype}[${t.shape.join(", ")}])`);
  const sizes = artifacts.manifest.parameters.map((p) => p.shape.reduce((a, b) => a * b, 1));
  show("own-state", `A model of ${sizes.length} parameters, ${sizes.reduce((a, b) => a + b, 0)} numbers. It takes ${inputs.join(" and ")}. Now give it numbers: a CSV with these columns, or an NPZ with these arrays.`);
}

async function takeNumbers(file: File): Promise<void> {
  if (!artifacts) throw new Error("give the folder of artifacts first");
  table = columnsFor(inputsOf(artifacts), await readTable(file));
  fileName = file.name;
  const rows = Object.values(table)[0]!.dims[0]!;
  if (rows < 2) throw new Error(`${file.name}: ${rows} row is too few to train and test with`);
  show("own-state", `${rows} rows from ${file.name}; one in five is kept to test with. Press "Train my model".`);
}

async function take(files: readonly File[]): Promise<void> {
  const numbers = files.filter((f) => /\.(csv|tsv|txt|npz)$/i.test(f.name));
  const model = files.filter((f) => !numbers.includes(f));
  if (model.length) await takeModel(model);
  for (const file of numbers.slice(0, 1)) await takeNumbers(file);
}

/** Gives all files of what was dropped, those of folders too. */
async function dropped(transfer: DataTransfer): Promise<File[]> {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const read = async (entry: FileSystemEntry): Promise<File[]> => {
    if (entry.isFile) return [await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject))];
    const reader = (entry as FileSystemDirectoryEntry).createReader();
    const inner: FileSystemEntry[] = [];
    // Browsers give a hundred at a time.
    for (;;) {
      const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      inner.push(...some);
    }
    return (await Promise.all(inner.map(read))).flat();
  };
  return (await Promise.all(entries.map(read))).flat();
}

/** Wires the panel; `changed` is told when there may be something to train. */
export function ownPanel(changed: () => void): void {
  const got = (files: readonly File[] | Promise<File[]>) =>
    void attempt(async () => {
      try {
        await take(await files);
        say("Ready.");
      } catch (error) {
        show("own-state", (error as Error).message);
        throw error;
      } finally {
        changed();
      }
    });
  for (const id of ["own-model", "own-data"]) {
    const input = $<HTMLInputElement>(id);
    input.onchange = () => got([...(input.files ?? [])]);
  }
  const zone = $("own-zone");
  zone.ondragover = (event) => {
    event.preventDefault();
    zone.classList.add("over");
  };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    got(dropped(event.dataTransfer!));
  };
}
