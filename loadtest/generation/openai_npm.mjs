// The npm package `openai`, unmodified, against a server: node openai_npm.mjs FOLDER URL MODEL EMBEDDING
// FOLDER holds node_modules/openai. Prints a line of JSON for each check: its name, and the error if it failed.
import assert from "node:assert/strict";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, baseURL, model, embedding] = process.argv.slice(2);
const entry = path.resolve(folder, "node_modules", "openai", "index.mjs");
const { default: OpenAI } = await import(pathToFileURL(entry).href);
const messages = [
  { role: "system", content: "Answer in one sentence." },
  { role: "user", content: "What is the capital of France?" },
];
const greedy = { model, messages, temperature: 0, max_tokens: 24 };
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const checks = {
  async models() {
    const listed = [];
    for await (const each of client.models.list()) listed.push(each.id);
    assert(listed.includes(model), `${listed}`);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const answer = await client.chat.completions.create({ ...greedy, logprobs: true, top_logprobs: 2 });
    assert.match(answer.choices[0].message.content, /Paris/);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
  },
  async streaming() {
    const whole = (await client.chat.completions.create(greedy)).choices[0].message.content;
    let text = "", usage = null;
    const parts = await client.chat.completions.create({
      ...greedy, stream: true, stream_options: { include_usage: true },
    });
    for await (const part of parts) {
      text += part.choices[0]?.delta?.content ?? "";
      usage = part.usage ?? usage;
    }
    assert.equal(text, whole);
    assert(usage.completion_tokens > 0);
  },
  async "the helper for streams"() {
    const whole = (await client.chat.completions.create(greedy)).choices[0];
    const stream = client.chat.completions.stream(greedy);
    let text = "";
    stream.on("content", (delta) => { text += delta; });
    const last = await stream.finalChatCompletion();
    assert.equal(text, whole.message.content);
    assert.equal(last.choices[0].finish_reason, whole.finish_reason);
  },
  async "a stream that is left"() {
    const parts = await client.chat.completions.create({ ...greedy, max_tokens: 400, ignore_eos: true, stream: true });
    for await (const part of parts) if (part.choices[0]?.delta?.content) break;
    parts.controller.abort();
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: ["One", "Two"], temperature: 0, max_tokens: 6 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  },
  async "a JSON schema"() {
    const schema = {
      type: "object", properties: { unit: { enum: ["C", "F"] } }, required: ["unit"], additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { name: "unit", schema } };
    const answer = await client.chat.completions.create({ ...greedy, response_format });
    assert(["C", "F"].includes(JSON.parse(answer.choices[0].message.content).unit));
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string" } } };
    const tools = [{ type: "function", function: { name: "weather", description: "The weather.", parameters } }];
    const answer = await client.chat.completions.create({ ...greedy, tools, tool_choice: "auto" });
    const { content, tool_calls } = answer.choices[0].message;
    assert(content || tool_calls?.length, "neither a text nor a call");
    const call = { id: "call_1", type: "function", function: { name: "weather", arguments: '{"city": "Paris"}' } };
    const after = [...messages, { role: "assistant", content: null, tool_calls: [call] },
      { role: "tool", tool_call_id: "call_1", content: "sunny" }];
    const last = await client.chat.completions.create({ ...greedy, messages: after, tools });
    assert.equal(typeof last.choices[0].message.content, "string");
  },
  async embeddings() {
    const input = ["a cat", "a dog"];
    const packed = await client.embeddings.create({ model: embedding, input }); // base64 by default
    const plain = await client.embeddings.create({ model: embedding, input, encoding_format: "float" });
    assert.equal(packed.data.length, 2);
    packed.data[1].embedding.forEach((each, i) => assert(Math.abs(each - plain.data[1].embedding[i]) < 1e-6));
    const short = await client.embeddings.create({ model: embedding, input, dimensions: 4, encoding_format: "float" });
    assert.equal(short.data[0].embedding.length, 4);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...greedy, model: "none" }), (error) =>
      error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: 9 }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(client.completions.create({ model, prompt: Array(20000).fill(5) }), (error) =>
      error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded");
    await assert.rejects(client.chat.completions.create({ ...greedy, tools: "weather" }), OpenAI.BadRequestError);
  },
  // The server's queue is short: requests are refused with 503 and Retry-After until the package's own retries succeed.
  async retries() {
    const many = (options) => {
      let calls = 0;
      const counted = (...given) => { calls += 1; return fetch(...given); };
      const own = new OpenAI({ baseURL, apiKey: "none", fetch: counted, ...options });
      const asked = Array.from({ length: 8 }, (_, i) =>
        own.completions.create({ model, prompt: `Number ${i}`, temperature: 0, max_tokens: 40, ignore_eos: true }));
      return Promise.allSettled(asked).then((found) => ({ found, calls }));
    };
    const once = await many({ maxRetries: 0 });
    const refused = once.found.filter((each) => each.status === "rejected").map((each) => each.reason);
    assert(refused.length > 0, "no request was refused");
    refused.forEach((error) => assert.equal(error.status, 503));
    const { found, calls } = await many({ maxRetries: 20 });
    found.forEach((each) => assert.equal(each.status, "fulfilled", `${each.reason}`));
    assert(calls > 8, "no request was repeated");
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (thrown) {
    error = `${thrown?.message ?? thrown}`.slice(0, 500);
  }
  console.log(JSON.stringify({ check, error }));
}
