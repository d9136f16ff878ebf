// The `openai` client of npm calls tools: node tools.mjs http://127.0.0.1:8000
// Run where `npm install openai` was run. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { days: { type: "integer", minimum: 1, maximum: 3 }, by: { enum: ["train", "ship"] } },
  required: ["days", "by"],
  additionalProperties: false,
};
const asked = {
  model: "tiny",
  messages: [{ role: "user", content: "Is it raining in Oslo?" }],
  tools: [{ type: "function", function: { name: "Trip", parameters, strict: true } }],
  tool_choice: { type: "function", function: { name: "Trip" } },
  max_completion_tokens: 400,
  temperature: 0,
};
const whole = (await client.chat.completions.parse(asked)).choices[0];
const stream = client.chat.completions.stream(asked);
let pieces = 0;
stream.on("tool_calls.function.arguments.delta", () => { pieces += 1; });
const streamed = (await stream.finalChatCompletion()).choices[0];
const format = { type: "json_schema", json_schema: { name: "trip", schema: parameters, strict: true } };
const { tools, tool_choice, ...plain } = asked;
const parsed = (await client.chat.completions.parse({ ...plain, response_format: format })).choices[0].message.parsed;
console.log(JSON.stringify({
  whole: whole.message.tool_calls[0].function.parsed_arguments,
  reason: whole.finish_reason,
  streamed: JSON.parse(streamed.message.tool_calls[0].function.arguments),
  pieces,
  parsed,
}));
