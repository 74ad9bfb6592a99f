/** Parts of the site that need no browser. */
import { expect, test } from "vitest";
import { eachFile } from "../../../site/src/teach/classes.js";
import { Alphabet, choose, countOf, LENGTH, pieces } from "../../../site/src/write/characters.js";

const file = (name: string) => new File(["x"], name);

test("a file that is no picture does not keep the others from being taken", async () => {
  const taken: string[] = [];
  const take = async ({ name }: File) => {
    if (name.endsWith(".txt")) throw new Error(`${name} is no picture`);
    taken.push(name);
  };
  expect(await eachFile([file("a.png")], "Disc", take)).toBe("1 picture more for Disc.");
  await expect(eachFile([file("b.txt"), file("c.png"), file("d.png")], "Disc", take)).rejects.toThrow("b.txt is no picture. 2 pictures more for Disc.");
  await expect(eachFile([file("e.txt")], "Disc", take)).rejects.toThrow(/^e.txt is no picture$/);
  expect(taken).toEqual(["a.png", "c.png", "d.png"]);
});

test.each(["नमस्ते दुनिया ", "你好世界", "👩🏽‍🚀🚀 ok ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"])("a text of any script is counted, cut and written again: %s", (words) => {
  const text = words.repeat(20);
  const alphabet = new Alphabet(text);
  const numbers = alphabet.encode(text);
  expect(countOf(text)).toBe(numbers.length);
  expect(numbers.map((n) => alphabet.decode(n)).join("")).toBe(text);
  const { ids, labels } = pieces(numbers, 3);
  expect([ids.length, [...ids]]).toEqual([3 * LENGTH, [...labels]]);
});

test("of a text of one sign that sign is chosen", () => {
  const { characters } = new Alphabet("a".repeat(80));
  expect(characters.length).toBe(2);
  expect([0, 0.5, 1].map((random) => choose([9, -3, 7], 2, 0.7, random))).toEqual([1, 1, 1]);
});
