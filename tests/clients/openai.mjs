// The `openai` client of npm against a service: node openai.mjs http://127.0.0.1:8000
// Run where `npm install openai` was run. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any" });
const models = (await client.models.list()).data.map((model) => model.id);
const model = (await client.models.retrieve(models[0])).id;
const asked = { model, prompt: "It was a dark evening", max_tokens: 5, temperature: 0, logprobs: 1 };
const completion = await client.completions.create(asked);
const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: [{ type: "text", text: "It was" }] }],
  max_completion_tokens: 5,
  temperature: null,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "", usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const missing = await client.get("/nothing").catch((error) => [error.status, error.type]);
const logprobs = completion.choices[0].logprobs.token_logprobs.length;
console.log(JSON.stringify({ models, completion: completion.usage, logprobs, text, usage, missing }));
