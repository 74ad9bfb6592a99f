import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    globalSetup: "tests/global-setup.ts",
    // Long enough for a busy machine: only a hanging test reaches it.
    testTimeout: 1_200_000,
    hookTimeout: 1_200_000,
    expect: { poll: { timeout: 600_000 } },
    // What hung or lost its browser runs once more and is listed as flaky. A wrong value never does.
    retry: {
      count: 1,
      condition: /^(Test|Hook) timed out|Timeout \d+ms exceeded|has been closed|net::ERR_|ECONNREFUSED|ECONNRESET|socket hang up|fetch failed/,
    },
    reporters: ["./tests/flaky-reporter.ts", "default"],
    // The runtimes use several threads themselves. Browser tests wait much: two files run at a time.
    maxWorkers: 1,
  },
});
