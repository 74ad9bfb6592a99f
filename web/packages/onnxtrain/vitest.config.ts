import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    globalSetup: "tests/global-setup.ts",
    testTimeout: 60_000,
    hookTimeout: 60_000,
    // The runtimes have threads of their own.
    maxWorkers: 1,
  },
});
