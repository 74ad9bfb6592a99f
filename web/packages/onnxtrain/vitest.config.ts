import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    globalSetup: "tests/global-setup.ts",
    // Only what hangs takes this long, however busy the machine is.
    testTimeout: 1_200_000,
    hookTimeout: 1_200_000,
    expect: { poll: { timeout: 600_000 } },
    // What hung or lost its browser runs once more and is listed as flaky. A wrong value never does.
    retry: {
      count: 1,
      condition: /^(Test|Hook) timed out|Timeout \d+ms exceeded|has been closed|net::ERR_|ECONNREFUSED|ECONNRESET|socket hang up|fetch failed/,
    },
    reporters: ["./tests/flaky-reporter.ts", "default"],
    // The runtimes have threads of their own.
    maxWorkers: 1,
  },
});
