import type { Reporter, TestModule } from "vitest/node";

/** Lists the tests that failed and then passed, each with its first failure. */
export default class FlakyReporter implements Reporter {
  onTestRunEnd(modules: readonly TestModule[]): void {
    const tests = modules.flatMap((module) => [...module.children.allTests("passed")]);
    const flaky = tests.filter((test) => test.diagnostic()?.flaky);
    if (flaky.length) console.log("\nflaky: failed, then passed");
    for (const test of flaky) {
      const failure = test.result().errors?.[0];
      console.log(`FLAKY ${test.module.relativeModuleId} > ${test.fullName}\n${failure?.stack ?? failure?.message}`);
    }
  }
}
