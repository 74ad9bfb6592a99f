/** Keys of nodes, and how calls are signed with them. */
import { concat } from "../sha256.js";
import { FlowerError } from "./errors.js";
import { textBytes } from "./wire.js";

const CURVE = { name: "ECDSA", namedCurve: "P-384" };

export function subtle(): SubtleCrypto {
  if (globalThis.crypto?.subtle) return crypto.subtle;
  throw new FlowerError("there are no keys here: the page is not served securely\nhint: use https, or localhost");
}

/** Gives a new key pair; one that is not extractable cannot leave the browser. */
export const newKey = async (extractable = false): Promise<CryptoKeyPair> =>
  (await subtle().generateKey(CURVE, extractable, ["sign", "verify"])) as CryptoKeyPair;

/** Gives the keys as JSON, for places that store text only. */
export async function exportKey(key: CryptoKeyPair): Promise<string> {
  return JSON.stringify(await subtle().exportKey("jwk", key.privateKey));
}

/** Gives the keys that `exportKey` wrote. */
export async function importKey(text: string): Promise<CryptoKeyPair> {
  const { d, key_ops, ...shared } = JSON.parse(text) as JsonWebKey;
  const privateKey = await subtle().importKey("jwk", { ...shared, d } as JsonWebKey, CURVE, true, ["sign"]);
  const publicKey = await subtle().importKey("jwk", shared, CURVE, true, ["verify"]);
  return { privateKey, publicKey };
}

/** Gives a public key as a PEM file. */
export async function pem(key: CryptoKey): Promise<Uint8Array> {
  const lines = base64(new Uint8Array(await subtle().exportKey("spki", key))).match(/.{1,64}/g)!;
  return textBytes(`-----BEGIN PUBLIC KEY-----\n${lines.join("\n")}\n-----END PUBLIC KEY-----\n`);
}

/** Gives the public key as the line of a file that `flwr supernode register` takes. */
export async function publicKeyLine({ publicKey }: CryptoKeyPair): Promise<string> {
  const curve = "nistp384";
  const kind = `ecdsa-sha2-${curve}`;
  const point = new Uint8Array(await subtle().exportKey("raw", publicKey));
  // Each part has its length in front; none is longer than a byte tells.
  const parts = [textBytes(kind), textBytes(curve), point].flatMap((part) => [Uint8Array.of(0, 0, 0, part.length), part]);
  return `${kind} ${base64(concat(parts))}\n`;
}

/** Gives the signature of a text, as Python's cryptography has it. */
export async function sign(key: CryptoKey, text: string): Promise<Uint8Array> {
  const data = textBytes(text) as Uint8Array<ArrayBuffer>;
  return toDer(new Uint8Array(await subtle().sign({ name: "ECDSA", hash: "SHA-256" }, key, data)));
}

/** Gives a signature of two numbers side by side as ASN.1 has them: without zeros in front, never negative. */
export function toDer(pair: Uint8Array): Uint8Array {
  const half = pair.length / 2;
  const numbers = [pair.subarray(0, half), pair.subarray(half)].map((number) => {
    let start = 0;
    while (start < half - 1 && number[start] === 0) start++;
    const digits = number.subarray(start);
    const sign = digits[0]! > 127 ? [0] : [];
    return concat([Uint8Array.of(2, digits.length + sign.length, ...sign), digits]);
  });
  const content = concat(numbers);
  return concat([Uint8Array.of(0x30, content.length), content]);
}

export function base64(data: Uint8Array): string {
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return btoa(text);
}
